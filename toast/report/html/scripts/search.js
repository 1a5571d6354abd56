/* Filters and search in the listing, links to ops, and keys. */

const kinds = new Map();
for (let op = 0; op < ops; op++) kinds.set(kindOf(op), (kinds.get(kindOf(op)) || 0) + 1);
byId("kind").append(...[...kinds].sort(([a], [b]) => (a < b ? -1 : 1)).map(([kind, n]) =>
  make("option", { value: kind }, `${kind} (${count(n)})`)));
byId("color").append(...data.colors.map((color, c) =>
  make("option", { value: String(c) }, `${color.label} ${color.name || color.arguments[0] || ""} (${count(color.names)})`)));

/* Texts per signature and per place, so that each is searched only once. */
const signatureText = listing.signatures.map(([kind, attributes, , operands, results]) =>
  [kind, attributes, ...[...operands, ...results].map(([t]) => typeText(listing.types[t]))].join(" ").toLowerCase());
const placeTexts = listing.paths.map((path, i) => {
  const [file, line, called] = listing.spots[listing.path_spot[i]];
  return `${path} ${file}:${line} ${called}`.toLowerCase();
});
const foldTexts = folds.map((fold) => `${fold.heading} ${fold.name}`.toLowerCase());
const ownTexts = new Map(); /* paths of arguments and results, names of values */
function own(op, text) { if (text) ownTexts.set(op, `${ownTexts.get(op) || ""} ${text.toLowerCase()}`); }
for (let op = 0; op < ops; op++) { own(op, pathText(op)); own(op, dotted(pathText(op))); }
for (const [value, label] of Object.entries(listing.labels)) own(valueOp[value], label);
/* For each op whether its texts, fold, arguments or collectives contain a word. */
function opsWith(word) {
  const inSignature = signatureText.map((text) => text.includes(word));
  const inPlace = placeTexts.map((text) => text.includes(word));
  const hits = new Uint8Array(ops), called = new Uint8Array(ops);
  folds.forEach(({ section }, i) => { if (foldTexts[i].includes(word)) hits.fill(1, section.start, section.stop); });
  for (const [op, text] of ownTexts) if (text.includes(word)) called[op] = 1;
  for (const [op, , kind, axes] of listing.moves) if (moveText(kind, axes).toLowerCase().includes(word)) hits[op] = 1;
  const numbered = /^(%|[\w.]*#)(\d+)$/.exec(word);
  if (numbered) {
    const op = numbered[1] === "%" ? valueOp[numbered[2]] : Number(numbered[2]);
    if (op < ops && ["%", "#", `${kindOf(op)}#`].includes(numbered[1])) hits[op] = 1;
  }
  if (word === "conflict") for (const op of torn.keys()) hits[op] = 1;
  for (let op = 0; op < ops; op++)
    if (called[op] || inSignature[listing.signature[op]] || inPlace[listing.place[op]] ||
      listing.operands[op].some((value) => isArgument(valueOp[value]) && called[valueOp[value]])) hits[op] = 1;
  return hits;
}
function hasColor(op, color) {
  for (let name = firstName[op]; name < firstName[op + 1]; name++)
    if (colorOf[name] >= 0 && colorKind(colorOf[name]) === color) return true;
  return false;
}
const onlys = {
  moves: (op) => moves.has(op), reshards: (op) => reshards.has(op),
  conflicts: (op) => torn.has(op), spent: (op) => seconds(op) > 0,
};
const FEW = 400;
let last = null;
function filter() {
  const query = byId("query").value.trim().toLowerCase(), kind = byId("kind").value;
  const color = byId("color").value, only = byId("only").value;
  const asked = JSON.stringify([query, kind, color, only]);
  if (asked === last) return;
  last = asked;
  for (const id of ["query", "kind", "color", "only"]) remember(id, byId(id).value.trim());
  const unfiltered = !query && !kind && !color && !only;
  matching = unfiltered ? null : new Uint8Array(ops);
  let hitCount = ops;
  if (matching) {
    const words = query.split(/\s+/).filter(Boolean), sets = words.map(opsWith);
    hitCount = 0;
    for (let op = 0; op < ops; op++) {
      const hit = (!kind || kindOf(op) === kind) && (!color || hasColor(op, Number(color))) &&
        (!only || onlys[only](op)) && sets.every((has) => has[op]);
      if (hit) { matching[op] = 1; hitCount++; }
    }
    if (!hitCount) emptied(words.filter((_, i) => !sets[i].includes(1)), words);
  }
  for (const fold of folds) {
    fold.matched = matched(fold.section);
    const n = fold.matched ? fold.matched.length : -1;
    const length = fold.section.stop - fold.section.start;
    fold.element.hidden = n === 0;
    fold.size.textContent = n < 0 ? several(length, "op") : `${count(n)} of ${count(length)}`;
    const open = fold.button.getAttribute("aria-expanded") === "true";
    /* Folds that a filter opened are closed after it; folds that the user opened stay open. */
    if (n > 0 && hitCount <= FEW && !open) { setOpen(fold, true); fold.byFilter = true; }
    else if (n < 0 && fold.byFilter) setOpen(fold, false);
    else if (open) setOpen(fold, true);
  }
  for (const group of new Set(folds.map((fold) => fold.group).filter(Boolean))) {
    group.button.hidden = Boolean(matching);
    group.inner.hidden = !matching && !group.open;
  }
  empty.hidden = hitCount > 0;
  for (const phase of phases) phase.heading.hidden = phase.folds.every((fold) => fold.element.hidden);
  byId("found").textContent = matching ? `${count(hitCount)} of ${several(ops, "op")}` : several(ops, "op");
}
/* Explain an empty listing; some words may occur in no op. */
function emptied(unknown, words) {
  const chosen = ["kind", "color", "only"].map(byId).filter((select) => select.value);
  const quoted = (list) => list.map((word) => `\u201c${word}\u201d`).join(" and ");
  const all = [words.length ? quoted(words) : "", ...chosen.map((select) =>
    `${select.id} ${select.selectedOptions[0].textContent.replace(/ *\([\d,]+\)$/, "")}`)];
  empty.replaceChildren(unknown.length ? `No op has ${quoted(unknown)}. ` : `No op matches ${all.filter(Boolean).join(", ")}. `,
    "The search covers layers, arguments and the ops that use them, kinds, types, collectives, functions and source lines; an op must contain all words.",
    make("button", { type: "reset", form: "filters", onclick: () => byId("query").focus() }, "Show all ops"));
}
let waiting = 0;
byId("filters").addEventListener("submit", (event) => event.preventDefault());
byId("query").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(filter, 120); });
for (const id of ["kind", "color", "only"]) byId(id).addEventListener("change", filter);
byId("filters").addEventListener("reset", () => setTimeout(filter));
byId("fold-all").addEventListener("click", () => { for (const fold of folds) setOpen(fold, false); });
function showOnly(values) {
  byId("filters").reset();
  for (const [id, value] of Object.entries(values)) byId(id).value = value;
  filter();
  byId("program").scrollIntoView();
  byId("query").focus({ preventScroll: true });
}
for (const button of document.querySelectorAll("[data-kind]"))
  button.addEventListener("click", () => showOnly({ kind: button.dataset.kind }));
for (const button of document.querySelectorAll("[data-line]"))
  button.addEventListener("click", () => showOnly({ query: button.dataset.line }));
for (const button of document.querySelectorAll("[data-color]"))
  button.addEventListener("click", () => showOnly({ color: button.dataset.color }));
if (byId("only-moves")) byId("only-moves").addEventListener("click", () => showOnly({ only: "moves" }));

/* Show an op: unfold its section up to it, and mark it. */
function reveal(op) {
  const fold = folds[sectionOf(op)];
  if (!fold) return;
  if (matching && !matching[op]) { byId("filters").reset(); filter(); }
  if (fold.group && !matching) openGroup(fold.group, true);
  const open = fold.button.getAttribute("aria-expanded") === "true";
  let at = open ? fold.all.indexOf(op) : (fold.matched ? fold.matched.indexOf(op) : op - fold.section.start);
  if (!open || at >= fold.until()) setOpen(fold, true, Math.max(PAGE, at + 50));
  for (const old of document.querySelectorAll("tr.here")) old.classList.remove("here");
  const element = byId(`op-${op}`);
  element.classList.add("here");
  element.scrollIntoView({ block: "center" });
  element.querySelector("button.op").focus({ preventScroll: true });
}
document.addEventListener("click", (event) => {
  const link = event.target.closest && event.target.closest("a");
  const hash = link && (link.getAttribute("href") || "");
  if (hash && /^#op-\d+$/.test(hash)) {
    event.preventDefault();
    remember("op", hash.slice(4));
    reveal(Number(hash.slice(4)));
  }
});
function goTo() {
  const op = /^#op-\d+$/.test(location.hash) ? location.hash.slice(4) : view.get("op");
  if (/^\d+$/.test(op || "") && Number(op) < ops) reveal(Number(op));
}
window.addEventListener("hashchange", goTo);

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest && event.target.closest("input, select, textarea");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    byId("query").focus();
    byId("query").select();
  } else if (event.key === "Escape" && event.target === byId("query")) {
    byId("query").value = "";
    filter();
  }
});

for (const id of ["query", "kind", "color", "only"]) if (view.has(id)) byId(id).value = view.get(id);
recall();
filter();
if (ops <= PAGE) for (const fold of folds) setOpen(fold, true);
goTo();
document.documentElement.dataset.ready = "true";
