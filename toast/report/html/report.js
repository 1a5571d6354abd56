"use strict";
/* What moves in a report: the theme, the timeline's readout, the conflicts and the listing. Names
   are only ever set as text. */
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const listing = data.listing;
  const byId = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";

  /* An element with attributes and children; strings become text. */
  function make(name, attributes = {}, ...children) {
    const element = document.createElement(name);
    return filled(element, attributes, children);
  }
  function draw(name, attributes = {}, ...children) {
    return filled(document.createElementNS(SVG, name), attributes, children);
  }
  function filled(element, attributes, children) {
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
      else if (value !== false && value !== null) element.setAttribute(key, value === true ? "" : value);
    }
    element.append(...children.flat().filter((child) => child !== null && child !== ""));
    return element;
  }
  const digits = (x) => (x >= 999.5 ? x.toFixed(0) : String(Number(x.toPrecision(3))));
  function sizeText(bytes) {
    for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
      if (bytes >= size) return `${digits(bytes / size)} ${unit}`;
    return `${bytes.toFixed(0)} B`;
  }
  function timeText(seconds) {
    for (const [unit, size] of [["s", 1], ["ms", 1e-3]])
      if (seconds >= size) return `${digits(seconds / size)} ${unit}`;
    return seconds && seconds < 5e-9 ? "< 0.01 us" : `${digits(seconds / 1e-6)} us`;
  }
  const count = (n) => n.toLocaleString("en-US");
  const several = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

  /* -- theme ------------------------------------------------------------------------------- */

  const themes = ["", "light", "dark"];
  const root = document.documentElement;
  function setTheme(theme) {
    if (theme) root.dataset.theme = theme;
    else delete root.dataset.theme;
    byId("theme").textContent = `Theme: ${theme || "as the system"}`;
  }
  let theme = "";
  try { theme = localStorage.getItem("toast-theme") || ""; } catch { /* not kept then */ }
  setTheme(themes.includes(theme) ? theme : "");
  byId("theme").addEventListener("click", () => {
    const next = themes[(themes.indexOf(root.dataset.theme || "") + 1) % themes.length];
    setTheme(next);
    try { localStorage.setItem("toast-theme", next); } catch { /* not kept then */ }
  });

  /* -- long tables and the navigation ------------------------------------------------------ */

  for (const button of document.querySelectorAll(".show-more"))
    button.addEventListener("click", () => {
      const rows = byId(button.dataset.table).querySelectorAll("tr.more");
      for (const row of rows) row.hidden = false;
      button.closest("p").remove();
      rows[0].querySelector("th").tabIndex = -1;
      rows[0].querySelector("th").focus();
    });
  const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
  const seen = new Set();
  const watch = new IntersectionObserver((entries) => {
    for (const e of entries) e.isIntersecting ? seen.add(e.target.id) : seen.delete(e.target.id);
    const first = [...links.keys()].find((id) => seen.has(id));
    if (!first) return;
    for (const [id, link] of links)
      id === first ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
  }, { rootMargin: "-10% 0px -60% 0px" });
  for (const id of links.keys()) if (byId(id)) watch.observe(byId(id));

  /* -- the program, unpacked ---------------------------------------------------------------- */

  function unrolled(runs, Kind = Int32Array) {
    let length = 0;
    for (let i = 1; i < runs.length; i += 2) length += runs[i];
    const found = new Kind(length);
    for (let i = 0, at = 0; i < runs.length; i += 2) {
      found.fill(runs[i], at, at + runs[i + 1]);
      at += runs[i + 1];
    }
    return found;
  }
  const ops = listing.ops;
  const signature = (op) => listing.signatures[listing.signature[op]];
  const kindOf = (op) => signature(op)[0];
  const colorOf = unrolled(listing.color), held = unrolled(listing.held);
  const repeats = unrolled(listing.repeats), valueSpec = unrolled(listing.value_spec);
  const firstName = new Int32Array(ops + 1), firstValue = new Int32Array(ops + 1);
  const valueOp = new Int32Array(valueSpec.length);
  for (let op = 0; op < ops; op++) {
    const [, , factors, , results] = signature(op);
    firstName[op + 1] = firstName[op] + factors.length;
    firstValue[op + 1] = firstValue[op] + results.length;
    valueOp.fill(op, firstValue[op], firstValue[op + 1]);
  }
  function opOfName(name) {
    let low = 0, high = ops;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (firstName[middle] <= name) low = middle; else high = middle;
    }
    return low;
  }
  /* A value: the op that makes it and which of its results it is. */
  const made = (value) => [valueOp[value], value - firstValue[valueOp[value]]];
  function defNames(value) {
    const [op, result] = made(value);
    return signature(op)[4][result][1].map((factor) => firstName[op] + factor);
  }
  const useNames = (op, i) => signature(op)[3][i][1].map((factor) => firstName[op] + factor);
  const typeOf = (value) => {
    const [op, result] = made(value);
    return listing.types[signature(op)[4][result][0]];
  };
  const typeText = ([dtype, shape]) => `${dtype}[${shape.join(",")}]`;
  const spotOf = (op) => listing.path_spot[listing.place[op]];
  const pathOf = (op) => listing.paths[listing.place[op]];
  function placeText(op, long = false) {
    const [file, line, called] = listing.spots[spotOf(op)];
    if (!file) return "";
    return `${long ? file : file.slice(file.lastIndexOf("/") + 1)}:${line} ${called.replace(/^.*<locals>\./, "")}`;
  }
  const isArgument = (op) => op < listing.arguments.length;
  const isResult = (op) => op >= listing.first_return;
  const pathText = (op) => isArgument(op) ? listing.arguments[op]
    : isResult(op) ? listing.results[op - listing.first_return] : "";
  function opText(op) { return isArgument(op) ? listing.arguments[op] : `%${op}`; }
  function valueText(value) {
    const [op, result] = made(value);
    return opText(op) + (firstValue[op + 1] - firstValue[op] > 1 ? `.${result}` : "");
  }
  const reshards = new Map(), moves = new Map(), spent = new Map(), torn = new Map();
  for (const [op, operand, spec] of listing.reshards) {
    if (!reshards.has(op)) reshards.set(op, new Map());
    reshards.get(op).set(operand, listing.specs[spec]);
  }
  for (const move of listing.moves) {
    if (!moves.has(move[0])) moves.set(move[0], []);
    moves.get(move[0]).push(move);
  }
  for (const [op, products, memory] of listing.spent) spent.set(op, [products, memory]);
  data.conflicts.forEach(([, , , , sites], i) => {
    for (const site of sites) {
      const op = Array.isArray(site) ? site[0] : valueOp[site];
      if (!torn.has(op)) torn.set(op, []);
      torn.get(op).push(i);
    }
  });
  const moveSeconds = (op) => (moves.get(op) || []).reduce((sum, m) => sum + m[5], 0);
  function seconds(op) {
    const [products, memory] = spent.get(op) || [0, 0];
    return products + memory + moveSeconds(op);
  }
  const sectionOf = (op) => listing.sections.findIndex((s) => s.start <= op && op < s.stop);

  const colorLabel = (c) => listing.color_label[c], colorKind = (c) => listing.color_kind[c];
  /* A size with the letter and tint of its color, and the mesh axes on it. */
  function chip(size, color, axes = []) {
    const known = color >= 0;
    return make("span", { class: "dim" + (known ? ` c${colorKind(color) % 12}` : ""),
      title: known ? `color ${colorLabel(color)}${axes.length ? `, sharded over ${axes.join(" and ")}` : ""}` : "never sharded" },
      String(size), known ? make("sup", {}, colorLabel(color)) : "",
      axes.length ? make("span", { class: "on" }, axes.map((a) => make("i", {}, a))) : "");
  }
  function typeChips([dtype, shape], names, spec) {
    return [make("code", {}, dtype), ...shape.map((size, d) => chip(size, colorOf[names[d]], (spec && spec[d]) || []))];
  }
  const specOf = (value) => listing.specs[valueSpec[value]];

  /* -- memory ------------------------------------------------------------------------------ */

  function liveAt(memory, op) {
    let low = 0, high = memory.op.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (memory.op[middle] <= op) low = middle + 1; else high = middle;
    }
    return low ? memory.live_bytes[low - 1] : memory.argument_bytes;
  }
  const moment = byId("moment");
  function read(op) {
    const section = listing.sections[sectionOf(op)];
    byId("moment-text").textContent =
      `Before op ${op}: ${sizeText(liveAt(data.memory.after, op))} in the plan, ` +
      `${sizeText(liveAt(data.memory.before, op))} unsharded. ${kindOf(op)} ` +
      `${placeText(op)}, ${[section.phase, section.title].filter(Boolean).join(" ")}`;
    moment.setAttribute("aria-valuetext", byId("moment-text").textContent);
    for (const chart of document.querySelectorAll(".timeline")) {
      const [, , width] = chart.getAttribute("viewBox").split(" ").map(Number);
      const left = Number(chart.dataset.left), right = Number(chart.dataset.right);
      const x = left + (width - left - right) * op / ops;
      chart.querySelector(".cursor").setAttribute("transform", `translate(${x - left} 0)`);
      chart.classList.add("reading");
    }
  }
  moment.addEventListener("input", () => read(Number(moment.value)));
  for (const chart of document.querySelectorAll(".timeline"))
    chart.addEventListener("pointermove", (event) => {
      const box = chart.getBoundingClientRect(), width = Number(chart.getAttribute("viewBox").split(" ")[2]);
      const left = Number(chart.dataset.left), right = Number(chart.dataset.right);
      const at = ((event.clientX - box.left) * width / box.width - left) / (width - left - right);
      moment.value = Math.max(0, Math.min(ops - 1, Math.round(at * ops)));
      read(Number(moment.value));
    });
  if (ops) read(Number(moment.value));

  /* -- the listing ------------------------------------------------------------------------- */

  const PAGE = 250;
  const box = byId("listing");
  const folds = [];
  let matching = null; /* Uint8Array, or null for all ops */

  function tags(op) {
    const found = [];
    const kinds = new Map();
    for (const [, , kind, axes] of moves.get(op) || []) {
      const text = `${listing.move_kinds[kind]} ${listing.move_axes[axes].join("\u00d7")}`;
      kinds.set(text, (kinds.get(text) || 0) + 1);
    }
    for (const [text, n] of kinds) found.push(make("span", { class: "tag" }, text + (n > 1 ? ` \u00d7${n}` : "")));
    if (torn.has(op)) found.push(make("span", { class: "tag torn" }, "conflict"));
    return found;
  }
  function operandLinks(op) {
    const found = [];
    listing.operands[op].forEach((value, i) => {
      if (i) found.push(", ");
      found.push(make("a", { href: `#op-${made(value)[0]}` }, valueText(value)));
    });
    return found;
  }
  function row(op) {
    const [kind, , , , results] = signature(op);
    const value = firstValue[op];
    const shown = results.length ? results.map((r, i) => [i ? ", " : "",
      ...typeChips(listing.types[r[0]], defNames(value + i), specOf(value + i))]).flat()
      : listing.operands[op].map((v, i) => typeChips(typeOf(v), useNames(op, i), (reshards.get(op) || new Map()).get(i) || specOf(v))).flat();
    const time = seconds(op);
    const button = make("button", { type: "button", class: "op", "aria-expanded": "false", "aria-controls": `detail-${op}` },
      make("span", { class: "number" }, `%${op}`), pathText(op) || kind);
    const element = make("tr", { id: `op-${op}` }, make("th", { scope: "row" }, button),
      make("td", {}, ...shown), make("td", {}, ...tags(op), ...operandLinks(op)),
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
    add("op", make("code", {}, `%${op} ${kind}`), repeats[op] > 1 ? ` runs ${count(repeats[op])} times` : "",
      pathText(op) ? " " : "", pathText(op) ? make("code", {}, pathText(op)) : "");
    if (spot[0]) add("source", make("code", {}, placeText(op, true)), spot[3] ? make("br") : "", spot[3] ? make("code", {}, spot[3]) : "");
    if (pathOf(op)) add("path", make("code", {}, pathOf(op)));
    if (attributes) add("attributes", make("code", {}, attributes));
    add("sharding rule", make("code", {}, rule));
    listing.operands[op].forEach((value, i) => {
      const changed = (reshards.get(op) || new Map()).get(i);
      add(`operand ${i}`, make("a", { href: `#op-${made(value)[0]}` }, valueText(value)), " ",
        ...typeChips(typeOf(value), useNames(op, i), changed || specOf(value)),
        changed ? make("span", {}, " resharded from ", ...typeChips(typeOf(value), defNames(value), specOf(value))) : "");
    });
    results.forEach((r, i) => {
      const value = firstValue[op] + i;
      const sum = listing.sums.find((s) => s[0] === value);
      add(results.length > 1 ? `result ${i}` : "result", ...typeChips(listing.types[r[0]], defNames(value), specOf(value)),
        sum ? " summed up in parts" : "", listing.labels[value] ? ` called ${listing.labels[value]}` : "");
    });
    for (const [, operand, k, a, times, took, bytes] of moves.get(op) || [])
      add(listing.move_kinds[k], `of ${operand < 0 ? "the result" : `operand ${operand}`} over ${listing.move_axes[a].join(" and ")}, ` +
        `${sizeText(bytes)}${times === 1 ? "" : times < 1 ? ", shared with other ops" : `, ${times} times`}, ${timeText(took)}`);
    const [products, memory] = spent.get(op) || [0, 0];
    if (products) add("product", timeText(products));
    if (memory) add("memory traffic", timeText(memory));
    for (const i of (torn.get(op) || []).slice(0, 8))
      add(`conflict ${i}`, make("a", { href: "#conflicts", onclick: () => choose(i) }, conflictText(i)));
    return make("tr", { class: "detail", id: `detail-${op}` }, make("td", { colspan: "5" }, list));
  }
  function matched(section) {
    if (!matching) return null;
    const found = [];
    for (let op = section.start; op < section.stop; op++) if (matching[op]) found.push(op);
    return found;
  }
  function fill(fold, shown = PAGE) {
    const { section, body } = fold;
    const all = fold.matched || Array.from({ length: section.stop - section.start }, (_, i) => section.start + i);
    let end = Math.min(shown, all.length);
    const rows = make("tbody", {}, all.slice(0, end).map(row));
    body.replaceChildren(make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Ops of ${fold.name}` },
      make("table", { class: "ops" },
        make("thead", {}, make("tr", {}, ...[["op", "of-op"], ["result", "of-result"], ["operands and collectives", "of-operands"], ["source", "of-source"], ["time", "num"]]
          .map(([text, kind]) => make("th", { scope: "col", class: kind }, text)))), rows)));
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
    const fold = { section, body, button, element, size, name, matched: null, until: () => 0, all: [], byFilter: false };
    button.addEventListener("click", () => {
      fold.byFilter = false;
      setOpen(fold, button.getAttribute("aria-expanded") !== "true");
    });
    folds.push(fold);
    phases[phases.length - 1].folds.push(fold);
    box.append(element);
  });

  /* -- filters ----------------------------------------------------------------------------- */

  const kinds = new Map();
  for (let op = 0; op < ops; op++) kinds.set(kindOf(op), (kinds.get(kindOf(op)) || 0) + 1);
  byId("kind").append(...[...kinds].sort(([a], [b]) => (a < b ? -1 : 1)).map(([kind, n]) =>
    make("option", { value: kind }, `${kind} (${count(n)})`)));
  byId("color").append(...data.colors.map((color, c) =>
    make("option", { value: String(c) }, `${color.label} ${color.arguments[0] || ""} (${count(color.names)})`)));

  /* Per signature and per place: what does not change from op to op is looked at once. */
  const signatureText = listing.signatures.map(([kind, attributes, , operands, results]) =>
    [kind, attributes, ...[...operands, ...results].map(([t]) => typeText(listing.types[t]))].join(" ").toLowerCase());
  const placeTexts = listing.paths.map((path, i) => {
    const [file, line, called] = listing.spots[listing.path_spot[i]];
    return `${path} ${file}:${line} ${called}`.toLowerCase();
  });
  const movedBy = (op, part) => (moves.get(op) || []).some((m) => listing.move_kinds[m[2]].includes(part));
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
    const unfiltered = !query && !kind && !color && !only;
    matching = unfiltered ? null : new Uint8Array(ops);
    let found = ops;
    if (matching) {
      const parts = query.split(/\s+/).filter(Boolean);
      const inSignature = parts.map((part) => signatureText.map((text) => text.includes(part)));
      const inPlace = parts.map((part) => placeTexts.map((text) => text.includes(part)));
      found = 0;
      for (let op = 0; op < ops; op++) {
        const hit = (!kind || kindOf(op) === kind) && (!color || hasColor(op, Number(color))) &&
          (!only || onlys[only](op)) && parts.every((part, i) =>
            inSignature[i][listing.signature[op]] || inPlace[i][listing.place[op]] || movedBy(op, part) ||
            (part[0] === "%" && part === `%${op}`) || pathText(op).toLowerCase().includes(part));
        if (hit) { matching[op] = 1; found++; }
      }
    }
    for (const fold of folds) {
      fold.matched = matched(fold.section);
      const n = fold.matched ? fold.matched.length : -1;
      const length = fold.section.stop - fold.section.start;
      fold.element.hidden = n === 0;
      fold.size.textContent = n < 0 ? several(length, "op") : `${count(n)} of ${count(length)}`;
      const open = fold.button.getAttribute("aria-expanded") === "true";
      /* What a filter unfolded is folded again behind it; what a person unfolded stays. */
      if (n > 0 && found <= FEW && !open) { setOpen(fold, true); fold.byFilter = true; }
      else if (n < 0 && fold.byFilter) setOpen(fold, false);
      else if (open) setOpen(fold, true);
    }
    for (const phase of phases) phase.heading.hidden = phase.folds.every((fold) => fold.element.hidden);
    byId("found").textContent = matching ? `${count(found)} of ${several(ops, "op")}` : several(ops, "op");
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

  /* Bring an op into view: unfold its section as far as it, and mark it. */
  function reveal(op) {
    const fold = folds[sectionOf(op)];
    if (!fold) return;
    if (matching && !matching[op]) { byId("filters").reset(); filter(); }
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
      history.replaceState(null, "", hash);
      reveal(Number(hash.slice(4)));
    }
  });
  const goTo = () => { if (/^#op-\d+$/.test(location.hash)) reveal(Number(location.hash.slice(4))); };
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

  /* -- conflicts --------------------------------------------------------------------------- */

  const factorOf = (name) => { const op = opOfName(name); return signature(op)[2][name - firstName[op]]; };
  function nameText(name) {
    const op = opOfName(name);
    return isArgument(op) ? `${listing.arguments[op]}:${factorOf(name)}` : `${kindOf(op)} ${factorOf(name)}`;
  }
  const siteOp = (site) => (Array.isArray(site) ? site[0] : valueOp[site]);
  function conflictText(i) {
    const [name, other] = data.conflicts[i];
    return `${nameText(name)} and ${factorOf(other) === factorOf(name) ? nameText(other) : opOfName(name) === opOfName(other) ? factorOf(other) : nameText(other)}`;
  }
  const folded = (text) => text.replace(/\[\d+\]/g, "[*]");
  const alike = new Map();
  data.conflicts.forEach(([, , , , sites], i) => {
    const section = listing.sections[sectionOf(siteOp(sites[0]))];
    const key = [folded(conflictText(i)), placeText(siteOp(sites[0])), section.phase].join("\n");
    if (!alike.has(key)) alike.set(key, []);
    alike.get(key).push(i);
  });
  const groups = [...alike.values()];
  const groupOf = new Map(groups.flatMap((members) => members.map((i) => [i, members])));
  const conflictButtons = new Map();
  if (data.conflicts.length) {
    const body = make("tbody");
    for (const members of groups) {
      const [, , , , sites] = data.conflicts[members[0]];
      const op = siteOp(sites[0]);
      const button = make("button", { type: "button", "aria-pressed": "false", onclick: () => choose(members[0]) }, folded(conflictText(members[0])));
      conflictButtons.set(members, button);
      body.append(make("tr", {}, make("th", { scope: "row" }, button),
        make("td", { class: "num" }, String(members[0])), make("td", {}, make("small", {}, `${placeText(op)} ${listing.sections[sectionOf(op)].phase}`)),
        make("td", { class: "num alike" }, count(members.length))));
    }
    byId("conflict-list").append(make("table", {}, make("caption", {}, `${several(groups.length, "kind")} of conflicts`),
      make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "names"), make("th", { scope: "col", class: "num" }, "number"), make("th", { scope: "col" }, "where"),
        make("th", { scope: "col", class: "num" }, "alike"))), body));
  }
  /* The dimension graph: an edge from where a value is defined to each use. */
  let graph = null;
  function dimensionGraph() {
    if (graph) return graph;
    const to = new Map(), from = new Map();
    const put = (map, a, b) => {
      const list = map.get(a);
      if (!list) map.set(a, [b]); else if (!list.includes(b)) list.push(b);
    };
    for (let op = 0; op < ops; op++)
      listing.operands[op].forEach((value, i) => {
        const uses = useNames(op, i);
        defNames(value).forEach((name, d) => { put(to, name, uses[d]); put(from, uses[d], name); });
      });
    graph = { to, from };
    return graph;
  }
  const LONG = 24;
  /* The shortest way between two names along edges in either direction, and what is next to its ends. */
  function around(name, other) {
    const { to, from } = dimensionGraph();
    const near = (n) => [...(from.get(n) || []), ...(to.get(n) || [])];
    const before = new Map([[name, -1]]);
    let front = [name];
    while (front.length && !before.has(other)) {
      const next = [];
      for (const n of front) for (const m of near(n)) if (!before.has(m)) { before.set(m, n); next.push(m); }
      front = next;
    }
    const way = [];
    if (before.has(other)) for (let n = other; n !== -1; n = before.get(n)) way.push(n);
    const kept = new Set(way.length > LONG ? [...way.slice(0, LONG / 2), ...way.slice(-LONG / 2)] : way);
    kept.add(name).add(other);
    for (const n of [name, other])
      for (const side of [from, to])
        for (const m of (side.get(n) || []).slice(0, 2)) kept.add(m);
    const nodes = [...kept].sort((a, b) => a - b);
    const edges = [];
    for (const n of nodes) for (const m of to.get(n) || []) if (kept.has(m)) edges.push([n, m]);
    const onWay = new Set(way.slice(1).flatMap((n, i) => [`${way[i]},${n}`, `${n},${way[i]}`]));
    return { nodes, edges, onWay, cut: Math.max(0, way.length - LONG), way };
  }
  /* Layers by the longest way from the top, names in conflict side by side. */
  function layers(nodes, edges, pairs) {
    const layer = new Map(nodes.map((n) => [n, 0]));
    const ordered = [...edges].sort((x, y) => x[1] - y[1]);
    for (let turn = 0, moved = true; moved; turn++) {
      if (turn > nodes.length) return null;
      moved = false;
      const raise = (n, least) => { if (layer.get(n) < least) { layer.set(n, least); moved = true; } };
      for (const [a, b] of ordered) raise(b, layer.get(a) + 1);
      for (const [a, b] of pairs) { raise(a, layer.get(b)); raise(b, layer.get(a)); }
    }
    const bound = new Set([...pairs.flatMap(([a, b]) => [a, b]), ...edges.map(([, b]) => b)]);
    for (const n of [...nodes].reverse()) { /* sources stand just above what they lead to */
      const below = edges.filter(([a]) => a === n).map(([, b]) => layer.get(b));
      if (below.length && !bound.has(n)) layer.set(n, Math.min(...below) - 1);
    }
    return layer;
  }
  /* Names in layers, each as near to what is above and below it as there is room. */
  function placed({ nodes, edges }) {
    const kept = new Set(nodes);
    const pairs = data.conflicts.filter(([a, b]) => kept.has(a) && kept.has(b));
    let layer = layers(nodes, edges, pairs);
    /* Where one name of a conflict comes of the other they cannot be side by side. */
    if (!layer) layer = layers(nodes, edges, []);
    /* Long edges pass through every layer between, so that they go around names. */
    const chains = edges.map(([a, b]) => {
      const chain = [a];
      for (let y = layer.get(a) + 1; y < layer.get(b); y++) {
        chain.push(`${a},${b},${y}`);
        layer.set(`${a},${b},${y}`, y);
      }
      return [...chain, b];
    });
    const rows = [], next = new Map([...layer.keys()].map((n) => [n, [[], []]]));
    for (const [n, y] of layer) (rows[y] = rows[y] || []).push(n);
    for (const chain of chains)
      for (let i = 1; i < chain.length; i++) {
        next.get(chain[i])[0].push(chain[i - 1]);
        next.get(chain[i - 1])[1].push(chain[i]);
      }
    const x = new Map(), room = (n) => (typeof n === "string" ? 26 : W + GX);
    rows.forEach((r) => r.reduce((at, n) => { x.set(n, at + room(n) / 2); return at + room(n); }, 0));
    for (let turn = 0; turn < 9; turn++) {
      for (const r of turn % 2 ? [...rows].reverse() : rows) {
        if (!r) continue;
        const wish = new Map(r.map((n) => {
          const near = next.get(n)[turn % 2];
          return [n, near.length ? near.reduce((sum, m) => sum + x.get(m), 0) / near.length : x.get(n)];
        }));
        r.sort((a, b) => wish.get(a) - wish.get(b));
        let right = -Infinity, off = 0;
        for (const n of r) {
          x.set(n, Math.max(wish.get(n), right + room(n) / 2));
          right = x.get(n) + room(n) / 2;
          off += x.get(n) - wish.get(n);
        }
        for (const n of r) x.set(n, x.get(n) - off / r.length);
      }
    }
    const left = Math.min(...[...x].map(([n, at]) => at - room(n) / 2));
    const right = Math.max(...[...x].map(([n, at]) => at + room(n) / 2));
    const first = Math.min(...layer.values());
    const at = new Map([...x].map(([n, u]) => [n, [u - left + GX, 8 + (layer.get(n) - first) * (H + GY)]]));
    return { at, chains, width: right - left + 2 * GX, height: (Math.max(...layer.values()) - first + 1) * (H + GY) + 10 };
  }
  const W = 166, H = 38, GX = 12, GY = 26;
  function graphOf(name, other) {
    const found = around(name, other);
    const { at, chains, width, height } = placed(found);
    const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `Dimension graph around ${nameText(name)} and ${nameText(other)}` },
      draw("desc", {}, "Definitions above, uses below. The list behind the graph has the same in words."),
      draw("defs", {}, draw("marker", { id: "arrow", viewBox: "0 0 8 8", refX: "7", refY: "4", markerWidth: "8", markerHeight: "8", markerUnits: "userSpaceOnUse", orient: "auto" },
        draw("path", { class: "arrow", d: "M0 0L8 4L0 8z" }))));
    for (const chain of chains) {
      const [from, to] = [chain[0], chain[chain.length - 1]];
      let [x, y] = at.get(from), d = `M${x} ${y + H}`;
      y += H;
      for (const n of chain.slice(1)) {
        const [u, v] = at.get(n), bend = (v - y) / 2;
        d += `C${x} ${y + bend} ${u} ${v - bend} ${u} ${n === to ? v - 1 : v}`;
        if (n !== to) d += `V${v + H}`;
        [x, y] = [u, v + H];
      }
      svg.append(draw("path", { class: "edge" + (found.onWay.has(`${from},${to}`) ? " way" : ""), "marker-end": "url(#arrow)", d }));
    }
    const kept = new Set(found.nodes);
    for (const [a, b] of data.conflicts) {
      if (!kept.has(a) || !kept.has(b)) continue;
      const [[x, y], [u, v]] = [at.get(a), at.get(b)].sort((p, q) => p[0] - q[0]);
      const far = y === v && u - x > 1.5 * (W + GX);
      const d = far ? `M${x} ${y + H}C${x + 40} ${y + H + 26} ${u - 40} ${v + H + 26} ${u} ${v + H}`
        : u - x >= W ? `M${x + W / 2} ${y + H / 2}L${u - W / 2} ${v + H / 2}` : `M${x} ${y + H}L${u} ${v}`;
      svg.append(draw("path", { class: "torn-edge", d }));
    }
    for (const n of found.nodes) {
      const op = opOfName(n), [x, y] = at.get(n), c = colorOf[n];
      const axes = listing.holdings[held[n]];
      const text = nameText(n);
      const second = `${isArgument(op) ? "argument" : `%${op}`}${axes.length ? `, on ${axes.join("\u00d7")}` : ", whole"}`;
      svg.append(draw("g", { class: "node" + (n === name || n === other ? " torn" : "") },
        draw("a", { href: `#op-${op}`, "aria-label": `${text}, ${second}` },
          draw("title", {}, `${text} %${op} ${placeText(op)}`),
          draw("rect", { x: x - W / 2, y, width: W, height: H, rx: 5 }),
          draw("text", { x, y: y + 16, "text-anchor": "middle" }, shortened(text, 22)),
          draw("text", { x, y: y + 31, "text-anchor": "middle", class: "small" }, shortened(`${c >= 0 ? `${colorLabel(c)}, ` : ""}${second}`, 25)))));
    }
    return { svg, found };
  }
  const shortened = (text, most) => (text.length <= most ? text : `\u2026${text.slice(1 - most)}`);
  function choose(i) {
    const [name, other, set, group, sites] = data.conflicts[i];
    const members = groupOf.get(i), at = members.indexOf(i);
    for (const [key, button] of conflictButtons) button.setAttribute("aria-pressed", String(key === members));
    const { svg, found } = graphOf(name, other);
    const view = byId("conflict-view");
    const list = make("dl", {});
    const add = (term, ...content) => list.append(make("dt", {}, term), make("dd", {}, ...content));
    for (const site of sites.slice(0, 4)) {
      const op = siteOp(site), use = Array.isArray(site);
      const value = use ? listing.operands[op][site[1]] : site;
      add("tensor", ...typeChips(typeOf(value), use ? useNames(op, site[1]) : defNames(value), null),
        use ? ` as operand ${site[1]} of ` : " made by ", make("a", { href: `#op-${op}` }, `%${op} ${kindOf(op)}`), ` ${placeText(op)}`);
    }
    const holds = (n) => listing.holdings[held[n]].join(" and ") || "no axis";
    add("the plan", `${nameText(name)} (%${opOfName(name)}) has ${holds(name)}; ${nameText(other)} (%${opOfName(other)}) has ${holds(other)}`);
    add("resolved with", `compatibility set ${set}, resolution group ${group}`);
    add("explained by", make("code", {}, `${data.explain} --conflict ${i}`));
    const turn = (step) => choose(members[(at + step + members.length) % members.length]);
    view.replaceChildren(make("h3", {}, `Conflict ${i}: ${conflictText(i)}`),
      members.length > 1 ? make("div", { class: "steps" },
        make("button", { type: "button", id: "conflict-back", onclick: () => { turn(-1); byId("conflict-back").focus(); } }, "Previous"),
        `${at + 1} of ${members.length} alike`,
        make("button", { type: "button", id: "conflict-next", onclick: () => { turn(1); byId("conflict-next").focus(); } }, "Next")) : "",
      make("div", { class: "detail" }, list),
      make("div", { class: "graph", tabindex: "0", role: "region", "aria-label": "Dimension graph" }, svg),
      make("small", {}, "Red: the two dimensions in conflict. Dashed: conflicts. Bold: the shortest way that ties them" +
        (found.cut ? `, without ${several(found.cut, "step")} in its middle.` : ".")),
      make("details", {}, make("summary", {}, "The same as a list"), make("ul", {}, found.edges.map(([a, b]) =>
        make("li", {}, make("code", {}, `${nameText(a)} (%${opOfName(a)}) \u2192 ${nameText(b)} (%${opOfName(b)})`))))));
    /* Fit the width as far as it can still be read. */
    const drawn = view.querySelector(".graph svg");
    drawn.style.maxWidth = `${drawn.getAttribute("width")}px`;
    drawn.style.minWidth = `${0.8 * drawn.getAttribute("width")}px`;
    const frame = view.querySelector(".graph"), ends = [...drawn.querySelectorAll(".node.torn rect")].map((r) => r.getBoundingClientRect());
    const top = frame.getBoundingClientRect();
    frame.scrollTop += (ends[0].top + ends[ends.length - 1].bottom) / 2 - top.top - top.height / 2;
    frame.scrollLeft += (Math.min(...ends.map((e) => e.left)) + Math.max(...ends.map((e) => e.right))) / 2 - top.left - top.width / 2;
    view.dataset.conflict = String(i);
  }
  /* First, one that a person would look for: that the plan resolved, at a product, in many layers. */
  const worth = (members) => members.length + (held[data.conflicts[members[0]][0]] !== held[data.conflicts[members[0]][1]] ? 1e7 : 0) + (placeText(siteOp(data.conflicts[members[0]][4][0])) ? 1e6 : 0) +
    (members.some((i) => siteOp(data.conflicts[i][4][0]) < ops && kindOf(opOfName(data.conflicts[i][0])) === "dot_general") ? 1e8 : 0);
  if (data.conflicts.length) choose(groups.reduce((a, b) => (worth(b) > worth(a) ? b : a))[0]);

  filter();
  if (ops <= PAGE) for (const fold of folds) setOpen(fold, true);
  goTo();
  document.documentElement.dataset.ready = "true";
})();
