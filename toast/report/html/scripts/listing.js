/* The listing: one fold for each section of the program. */

const PAGE = 250;
const box = byId("listing");
const folds = [];
const empty = make("p", { class: "empty", hidden: true });
let matching = null; /* Uint8Array, or null for all ops */

const RESULT = -1;
/* Badges for the collectives and conflicts of an operand or of the result. */
function tags(op, operand) {
  const counts = new Map(), whose = operand === RESULT ? "the result" : `operand ${operand}`;
  for (const [, of, kind, axes] of moves.get(op) || []) {
    const text = moveText(kind, axes);
    if (of === operand) counts.set(text, (counts.get(text) || 0) + 1);
  }
  const conflict = (torn.get(op) || []).some(([, of]) => of === operand);
  return [...[...counts].map(([text, n]) =>
    make("span", { class: "tag", title: `of ${whose}` }, text + (n > 1 ? ` \u00d7${n}` : ""))),
    conflict ? make("span", { class: "tag torn", title: `of ${whose}` }, "conflict") : ""];
}
const operandLinks = (op) => listing.operands[op].map((value, i, all) =>
  [make("span", { class: "operand" }, tags(op, i), make("a", { href: `#op-${valueOp[value]}` }, valueText(value)),
    i + 1 < all.length ? "," : ""), " "]).flat();
function row(op) {
  const [kind, , , , results] = signature(op);
  const value = firstValue[op];
  const shown = results.length ? results.map((r, i) => [i ? ", " : "",
    ...typeChips(listing.types[r[0]], defNames(value + i), specOf(value + i))]).flat()
    : listing.operands[op].map((v, i) => typeChips(typeOf(v), useNames(op, i), (reshards.get(op) || new Map()).get(i) || specOf(v))).flat();
  const time = seconds(op);
  const button = make("button", { type: "button", class: "op", "aria-expanded": "false", "aria-controls": `detail-${op}` },
    make("span", { class: "number" }, numberText(op)), pathText(op) || kind,
    listing.names[value] && !isArgument(op) ? make("code", {}, ` ${listing.names[value]}`) : "");
  const element = make("tr", { id: `op-${op}` }, make("th", { scope: "row" }, button),
    make("td", {}, ...shown, ...tags(op, RESULT)), make("td", {}, ...operandLinks(op)),
    make("td", { class: "where" }, placeText(op)), make("td", { class: "num" }, time ? timeText(time) : ""));
  button.addEventListener("click", () => toggleDetail(element, button, op));
  return element;
}
function toggleDetail(element, button, op) {
  const open = button.getAttribute("aria-expanded") === "true";
  button.setAttribute("aria-expanded", String(!open));
  if (open) element.nextElementSibling.remove();
  else element.after(detail(op));
}
function detail(op) {
  const [kind, attributes, , , results, rule] = signature(op);
  const list = make("dl");
  const add = (term, ...content) => list.append(make("dt", {}, term), make("dd", {}, ...content));
  const spot = listing.spots[spotOf(op)];
  add("op", make("code", {}, opName(op)), repeats[op] > 1 ? ` runs ${count(repeats[op])} times` : "",
    pathText(op) ? " " : "", pathText(op) ? make("code", {}, pathText(op)) : "");
  if (spot[0]) add("source", make("code", {}, placeText(op, true)), spot[3] ? make("br") : "", spot[3] ? make("code", {}, spot[3]) : "");
  if (pathOf(op)) add("path", make("code", {}, pathOf(op)));
  if (attributes) add("attributes", make("code", {}, attributes));
  add("sharding rule", make("code", {}, rule));
  listing.operands[op].forEach((value, i) => {
    const changed = (reshards.get(op) || new Map()).get(i);
    add(`operand ${i}`, make("a", { href: `#op-${valueOp[value]}` }, valueText(value)), " ",
      ...typeChips(typeOf(value), useNames(op, i), changed || specOf(value)),
      changed ? make("span", {}, " resharded from ", ...typeChips(typeOf(value), defNames(value), specOf(value))) : "");
  });
  results.forEach((r, i) => {
    const value = firstValue[op] + i;
    const sum = listing.sums.find((s) => s[0] === value);
    add(results.length > 1 ? `result ${i}` : "result", make("code", {}, `%${value}`), " ", ...typeChips(listing.types[r[0]], defNames(value), specOf(value)),
      sum ? " stays a partial sum" : "", listing.labels[value] ? ` named ${listing.labels[value]}` : "");
  });
  for (const [, operand, k, a, times, took, bytes] of moves.get(op) || [])
    add(listing.move_kinds[k], `of ${operand < 0 ? "the result" : `operand ${operand}`} over ${listing.move_axes[a].join(" and ")}, ` +
      `${sizeText(bytes)}${times === 1 ? "" : times < 1 ? ", shared with other ops" : `, ${times} times`}, ${timeText(took)}`);
  const [products, memory] = spent.get(op) || [0, 0];
  if (products) add("product", timeText(products));
  if (memory) add("memory traffic", timeText(memory));
  for (const i of new Set((torn.get(op) || []).slice(0, 8).map(([i]) => i)))
    add(`conflict ${i}`, make("a", { href: "#conflicts", onclick: () => choose(i) }, conflictText(i)));
  return make("tr", { class: "detail", id: `detail-${op}` }, make("td", { colspan: "5" }, list));
}
function matched(section) {
  if (!matching) return null;
  const hits = [];
  for (let op = section.start; op < section.stop; op++) if (matching[op]) hits.push(op);
  return hits;
}
function fill(fold, shown = PAGE) {
  const { section, body } = fold;
  const all = fold.matched || Array.from({ length: section.stop - section.start }, (_, i) => section.start + i);
  let end = Math.min(shown, all.length);
  const rows = make("tbody", {}, all.slice(0, end).map(row));
  body.replaceChildren(fading(make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Ops of ${fold.name}` },
    make("table", { class: "ops" },
      make("thead", {}, make("tr", {}, ...[["op", "of-op"], ["result", "of-result"], ["operands", "of-operands"], ["source", "of-source"], ["time", "num"]]
        .map(([text, kind]) => make("th", { scope: "col", class: kind }, text)))), rows))));
  if (end < all.length) {
    const more = make("button", { type: "button" });
    const label = () => { more.textContent = `Show ${Math.min(PAGE, all.length - end)} more of ${count(all.length)}`; };
    more.addEventListener("click", () => {
      rows.append(...all.slice(end, end + PAGE).map(row));
      end = Math.min(end + PAGE, all.length);
      if (end < all.length) label(); else more.remove();
    });
    label();
    body.append(more);
  }
  fold.until = () => end;
  fold.all = all;
}
function setOpen(fold, open, shown) {
  fold.byFilter = fold.byFilter && open;
  fold.button.setAttribute("aria-expanded", String(open));
  fold.body.hidden = !open;
  if (open) fill(fold, shown);
  else fold.body.replaceChildren();
}
const phases = [];
listing.sections.forEach((section, i) => {
  const edge = section.title === "arguments" || section.title === "results";
  const before = listing.sections[i - 1];
  if (!before || edge || before.title === "arguments" || before.phase !== section.phase) {
    const heading = make("h3", { class: "phase" }, edge ? section.title : section.phase || section.detail.split(",")[0] || "ops");
    heading.textContent = heading.textContent[0].toUpperCase() + heading.textContent.slice(1);
    phases.push({ heading, folds: [] });
    box.append(heading);
  }
  let time = 0, moved = 0;
  for (let op = section.start; op < section.stop; op++) {
    time += seconds(op);
    moved += (moves.get(op) || []).length;
  }
  const name = [section.phase, section.title].filter(Boolean).join(" ");
  const size = make("span", { class: "num" }, several(section.stop - section.start, "op"));
  const body = make("div", { id: `fold-${i}`, hidden: true });
  const button = make("button", { type: "button", "aria-expanded": "false", "aria-controls": `fold-${i}` },
    make("span", { class: "mark", "aria-hidden": "true" }, "\u25b8"), make("span", { class: "title" }, section.title),
    make("span", { class: "about" }, section.detail), size,
    make("span", { class: "num moves" }, moved ? several(moved, "collective") : ""),
    make("span", { class: "num took" }, time ? timeText(time) : ""));
  const element = make("div", { class: "fold" }, make("h4", {}, button), body);
  const heading = phases[phases.length - 1].heading.textContent;
  const fold = { section, heading, body, button, element, size, name, matched: null, until: () => 0, all: [], byFilter: false };
  button.addEventListener("click", () => {
    fold.byFilter = false;
    setOpen(fold, button.getAttribute("aria-expanded") !== "true");
  });
  folds.push(fold);
  phases[phases.length - 1].folds.push(fold);
  box.append(element);
});
/* Layers with the same ops: the first is shown, the others are behind a button. */
const opsOf = ({ section }) => listing.signature.slice(section.start, section.stop).join();
for (const { folds: members } of phases)
  for (let i = 0, end; i < members.length; i = end) {
    const ops = opsOf(members[i]);
    for (end = i + 1; end < members.length && opsOf(members[end]) === ops; end++);
    if (end - i < 4) continue;
    const others = members.slice(i + 1, end), inner = make("div", { hidden: true, id: `alike-${others[0].body.id}` }, others.map((fold) => fold.element));
    const button = make("button", { type: "button", class: "alike-button", "aria-expanded": "false", "aria-controls": inner.id },
      make("span", { class: "mark", "aria-hidden": "true" }, "\u25b8"), ` ${others.length} alike: ${others[0].section.title} to ${others[others.length - 1].section.title}`);
    const group = { inner, button, open: false };
    for (const fold of others) fold.group = group;
    button.addEventListener("click", () => openGroup(group, !group.open));
    members[i].element.after(button, inner);
  }
function openGroup(group, open) {
  group.open = open;
  group.inner.hidden = !open;
  group.button.setAttribute("aria-expanded", String(open));
}
box.append(empty);
