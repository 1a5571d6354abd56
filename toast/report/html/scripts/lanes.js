/* The timeline of a step: lanes of ops and collectives, and memory by group, on one axis of time. */

const steps = data.timeline, PARTS = steps.parts;
function summed(differences) {
  let sum = 0;
  return Float64Array.from(differences, (d) => (sum += d));
}
const lanes = steps.lanes.map((lane) => ({ ...lane, op: summed(lane.op), begin: summed(lane.begin) }));
const store = { ...steps.memory, at: summed(steps.memory.at), op: summed(steps.memory.op) };
const inSeconds = (part) => part / PARTS * steps.seconds;
/* The last entry of a sorted array that is at most x, or -1. */
function lastUpTo(array, x) {
  let low = 0, high = array.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (array[middle] <= x) low = middle + 1; else high = middle;
  }
  return low - 1;
}
const peakAt = store.at[store.at.reduce((best, _, i) => (heldAt(i) > heldAt(best) ? i : best), 0)] || 0;
function heldAt(i) { return store.live.reduce((sum, row) => sum + row[i], 0); }

const frame = byId("lanes"), canvas = frame.querySelector("canvas"), slider = byId("at");
const shown = { from: 0, to: PARTS, at: peakAt, drag: null };
const LABEL = 15, BAR = 15, TOP = 22, FOOT = 18, MEMORY = 170, LEFT = 58;
const memoryTop = TOP + lanes.length * (LABEL + BAR + 3) + 26;
const height = memoryTop + MEMORY + FOOT;
let width = 0, pen = null;

const across = (part) => LEFT + (part - shown.from) / (shown.to - shown.from) * (width - LEFT);
const partAt = (x) => Math.max(0, Math.min(PARTS, shown.from + (x - LEFT) / (width - LEFT) * (shown.to - shown.from)));
let ink = {};
function readInk() {
  const style = getComputedStyle(root);
  ink = Object.fromEntries(["text", "soft", "line", "strong", "panel", "sunk", "products", "traffic", "moved", "none", "bad", "accent"]
    .map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  ink.host = ink.none;
  ink.font = `11px ${style.getPropertyValue("--sans")}`;
  ink.groups = store.groups.map((_, g) => getComputedStyle(byId(`group-${g}`)).backgroundColor);
}
function write(text, x, y, color, align = "left", most = Infinity) {
  pen.fillStyle = color;
  pen.textAlign = align;
  if (pen.measureText(text).width > most) {
    while (text.length > 1 && pen.measureText(`${text}\u2026`).width > most) text = text.slice(0, -1);
    if (text.length < 3) return;
    text += "\u2026";
  }
  pen.fillText(text, x, y);
}
const boxed = (color, x, y, w, h) => { pen.fillStyle = color; pen.fillRect(x, y, w, h); };

/* The sections of the program, then marks of time. */
function paintSections() {
  steps.sections.forEach((begin, i) => {
    const end = i + 1 < steps.sections.length ? steps.sections[i + 1] : PARTS;
    const x = Math.max(LEFT, across(begin)), w = Math.min(width, across(end)) - x;
    if (w < 1.5) return;
    boxed(i % 2 ? ink.sunk : ink.line, x, 2, w - 0.5, TOP - 8);
    write(listing.sections[i].title, x + 3, 12, ink.text, "left", w - 6);
  });
  for (const [begin, name] of steps.phases) {
    const x = across(begin);
    if (x < LEFT || x > width) continue;
    boxed(ink.strong, x, 0, 1, height - FOOT);
    write(name, x + 4, memoryTop - 8, ink.soft);
  }
}
/* The next number that is 1, 2 or 5 times a power of ten. */
function roundUp(number) {
  const power = 10 ** Math.floor(Math.log10(number));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= number * 0.999);
}
function paintAxis() {
  const step = roundUp(inSeconds(shown.to - shown.from) / Math.max(2, width / 160));
  for (let t = Math.ceil(inSeconds(shown.from) / step) * step; t <= inSeconds(shown.to) + step / 1e6; t += step) {
    const x = across(t / steps.seconds * PARTS);
    boxed(ink.line, x, TOP, 1, height - FOOT - TOP);
    if (x < width - 40) write(t ? timeText(t) : "0", x + 3, height - 5, ink.soft);
  }
}
function spanName(lane, k) {
  return lane.move ? listing.move_kinds[listing.moves[lane.move[k]][2]] : kindOf(lane.op[k]);
}
function paintLane(lane, y) {
  const what = lane.kind === "moved" ? `collectives over ${lane.name}` : lane.kind === "host" ? "transfers to the host" : lane.name;
  write(`${what}, ${timeText(lane.seconds)}`, LEFT, y + 11, ink.soft);
  const top = y + LABEL, color = ink[lane.kind];
  boxed(ink.sunk, LEFT, top, width - LEFT, BAR);
  let right = -1;
  for (let k = Math.max(0, lastUpTo(lane.begin, shown.from)); k < lane.begin.length && lane.begin[k] <= shown.to; k++) {
    const x = Math.max(LEFT, across(lane.begin[k])), end = Math.min(width, across(lane.begin[k] + lane.length[k]));
    if (end < LEFT || Math.max(end, x + 0.7) <= right) continue;
    const from = Math.max(x, right), w = Math.max(end - from, 0.7);
    boxed(color, from, top, w > 4 ? w - 0.6 : w, BAR);
    right = from + w;
    if (w > 44) write(spanName(lane, k), from + 3, top + 11, ink.panel, "left", w - 6);
  }
}
const scaleTop = () => {
  const peak = store.peak_bytes, limit = data.memory.limit_bytes;
  return Math.max(peak, limit < 2 * peak ? limit : 0, 1) * 1.06;
};
function paintMemory() {
  const top = scaleTop(), unit = store.peak_bytes / store.parts, base = memoryTop + MEMORY;
  const level = (bytes) => base - bytes / top * MEMORY;
  const unitOf = 1024 ** Math.floor(Math.log2(top) / 10), tick = unitOf * roundUp(top / unitOf / 4);
  for (let bytes = 0; bytes <= top; bytes += tick) {
    boxed(ink.line, LEFT, level(bytes), width - LEFT, 1);
    write(bytes ? sizeText(bytes) : "0", LEFT - 5, level(bytes) + 4, ink.soft, "right");
  }
  const first = Math.max(0, lastUpTo(store.at, shown.from)), last = Math.max(first, lastUpTo(store.at, shown.to));
  const below = new Float64Array(last - first + 1);
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, memoryTop - 4, width - LEFT, MEMORY + 4);
  pen.clip();
  store.live.forEach((row, g) => {
    const outline = (from, to, move) => {
      for (let i = from; move > 0 ? i <= to : i >= to; i += move) {
        const x = across(store.at[i]), end = i < last ? across(store.at[i + 1]) : across(PARTS);
        const y = level(below[i - first] * unit);
        if (move > 0) { pen.lineTo(x, y); pen.lineTo(end, y); } else { pen.lineTo(end, y); pen.lineTo(x, y); }
      }
    };
    pen.beginPath();
    outline(last, first, -1);
    for (let i = first; i <= last; i++) below[i - first] += row[i];
    outline(first, last, 1);
    pen.fillStyle = ink.groups[g];
    pen.fill();
  });
  pen.restore();
  if (data.memory.limit_bytes <= top) {
    boxed(ink.bad, LEFT, level(data.memory.limit_bytes), width - LEFT, 1.5);
    write(`limit ${sizeText(data.memory.limit_bytes)}`, width - 4, level(data.memory.limit_bytes) - 4, ink.bad, "right");
  }
}
function paint() {
  if (!width) return;
  pen.clearRect(0, 0, width, height);
  pen.font = ink.font;
  paintAxis();
  paintSections();
  lanes.forEach((lane, i) => paintLane(lane, TOP + i * (LABEL + BAR + 3)));
  paintMemory();
  if (shown.drag) {
    pen.globalAlpha = 0.25;
    const [a, b] = [across(shown.drag[0]), across(shown.drag[1])];
    boxed(ink.accent, Math.min(a, b), 0, Math.abs(b - a), height - FOOT);
    pen.globalAlpha = 1;
  }
  const x = across(shown.at);
  if (x >= LEFT && x <= width) boxed(ink.text, x - 0.5, 0, 1.2, height - FOOT);
}
function resize() {
  const scale = window.devicePixelRatio || 1;
  width = frame.clientWidth;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = `${height}px`;
  pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  readInk();
  paint();
}

/* -- what is at a moment ------------------------------------------------------------------- */

function opAt(part) {
  let op = 0, from = -1;
  for (const lane of lanes) {
    const k = lane.kind === "products" || lane.kind === "traffic" ? lastUpTo(lane.begin, part) : -1;
    if (k >= 0 && lane.begin[k] >= from) [op, from] = [lane.op[k], lane.begin[k]];
  }
  const i = lastUpTo(store.at, part);
  return i >= 0 && store.at[i] >= from ? store.op[i] : op;
}
function running(lane) {
  const k = lastUpTo(lane.begin, shown.at);
  if (k < 0 || lane.begin[k] + Math.max(lane.length[k], 1) <= shown.at) return "nothing";
  const op = lane.op[k], move = lane.move && listing.moves[lane.move[k]];
  const took = move ? move[5] : (spent.get(op) || [0, 0])[lane.kind === "products" ? 0 : 1] || inSeconds(lane.length[k]);
  return [spanName(lane, k), move ? " for " : " ", make("a", { href: `#op-${op}` }, move ? opName(op) : numberText(op)), ` ${placeText(op)}, ${timeText(took)}`];
}
const groupCells = store.groups.map((_, g) => [byId(`group-bytes-${g}`), byId(`group-list-${g}`), byId(`group-bar-${g}`)]);
/* The buffers of a group at an op, those of repeated layers in one line. */
function listed(g, op) {
  const lines = new Map(), layers = new Map();
  for (const [group, label, section, bytes, first, last] of store.buffers) {
    if (group !== g || op < first || op >= last) continue;
    const line = lines.get(label) || [0, 0, new Set()];
    line[0] += bytes; line[1]++; line[2].add(section);
    lines.set(label, line);
    layers.set(section, (layers.get(section) || 0) + bytes);
  }
  const order = [...lines].sort((a, b) => b[1][0] - a[1][0]);
  const items = order.slice(0, 3).map(([label, [bytes, n, sections]]) => make("li", {},
    `${sizeText(bytes)} `, make("span", { class: "what" }, store.labels[label]), n > 1 ? ` \u00d7 ${n}${sections.size > 1 ? ` in ${sections.size} sections` : ""}` : ""));
  if (order.length > 3) items.push(make("li", {}, `and ${order.length - 3} more`));
  return [items.length ? make("ul", {}, items) : "", layers.size > 2 ? strip(layers) : ""];
}
/* One bar for each section; those of equal height are told in words. */
function strip(layers) {
  const most = Math.max(...layers.values()), entries = [...layers].sort(([a], [b]) => a - b);
  const sizes = new Map();
  for (const [, bytes] of entries) sizes.set(sizeText(bytes), (sizes.get(sizeText(bytes)) || 0) + 1);
  const [size, alike] = [...sizes].reduce((a, b) => (b[1] > a[1] ? b : a));
  const w = Math.min(14, 260 / entries.length);
  const text = `${entries.length} sections: ${alike} alike with ${size} each`;
  return make("figure", { class: "layers" }, draw("svg", { width: w * entries.length, height: 30, role: "img", "aria-label": text },
    draw("title", {}, text), ...entries.map(([section, bytes], i) => draw("rect", { x: i * w, y: 30 - 30 * bytes / most, width: Math.max(w - 1, 0.6), height: 30 * bytes / most, class: "products" },
      draw("title", {}, `${listing.sections[section].title}: ${sizeText(bytes)}`)))), make("figcaption", {}, text));
}
function tell() {
  const op = opAt(shown.at), section = listing.sections[sectionOf(Math.min(op, ops - 1))], i = Math.max(0, lastUpTo(store.at, shown.at));
  const unit = store.peak_bytes / store.parts, total = heldAt(i) * unit;
  const where = section ? [section.phase, section.title].filter(Boolean).join(" ") : "";
  const text = `${timeText(inSeconds(shown.at))} of ${timeText(steps.seconds)}, ${where}: ${sizeText(total)} in memory`;
  byId("at-text").textContent = text;
  slider.value = shown.at;
  slider.setAttribute("aria-valuetext", text);
  byId("at-lanes").replaceChildren(...lanes.flatMap((lane) => [make("dt", {}, lane.name), make("dd", {}, running(lane))]));
  groupCells.forEach(([bytes, list, bar], g) => {
    const size = store.live[g][i] * unit;
    bytes.textContent = sizeText(size);
    bar.style.width = `${100 * size / Math.max(store.peak_bytes, 1)}%`;
    list.replaceChildren(...(size ? listed(g, op) : []));
  });
}
let awaiting = 0;
function show(change) {
  Object.assign(shown, change);
  if (awaiting) return;
  awaiting = requestAnimationFrame(() => { awaiting = 0; paint(); tell(); range(); });
}
function range() {
  const all = shown.from === 0 && shown.to === PARTS;
  byId("range").textContent = all ? "the whole step" : `${timeText(inSeconds(shown.from))} to ${timeText(inSeconds(shown.to))}`;
  byId("zoom-out").disabled = byId("zoom-all").disabled = all;
  remember("range", all ? "" : `${Math.round(shown.from)}-${Math.round(shown.to)}`);
  remember("at", shown.at === peakAt ? "" : String(Math.round(shown.at)));
}
function zoom(from, to) {
  const span = Math.max(20, Math.min(PARTS, to - from)), begin = Math.max(0, Math.min(PARTS - span, from));
  show({ from: begin, to: begin + span });
}
const zoomBy = (factor, around = shown.at) => zoom(around - (around - shown.from) * factor, around + (shown.to - around) * factor);
function moveTo(part) {
  const at = Math.max(0, Math.min(PARTS, part));
  if (at < shown.from || at > shown.to) { const half = (shown.to - shown.from) / 2; zoom(at - half, at + half); }
  show({ at });
}
byId("zoom-in").addEventListener("click", () => zoomBy(0.5));
byId("zoom-out").addEventListener("click", () => zoomBy(2));
byId("zoom-all").addEventListener("click", () => show({ from: 0, to: PARTS }));
byId("at-peak").addEventListener("click", () => moveTo(peakAt));
slider.addEventListener("input", () => moveTo(Number(slider.value)));
const pointed = (event) => partAt(event.clientX - frame.getBoundingClientRect().left);
canvas.addEventListener("pointerdown", (event) => { if (event.pointerType !== "touch") { canvas.setPointerCapture(event.pointerId); show({ drag: [pointed(event), pointed(event)] }); } });
canvas.addEventListener("pointermove", (event) => show(shown.drag ? { drag: [shown.drag[0], pointed(event)], at: pointed(event) } : { at: pointed(event) }));
canvas.addEventListener("pointerup", () => {
  const drag = shown.drag;
  show({ drag: null });
  if (drag && Math.abs(across(drag[0]) - across(drag[1])) > 5) zoom(Math.min(...drag), Math.max(...drag));
});
canvas.addEventListener("dblclick", () => show({ from: 0, to: PARTS }));
canvas.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  zoomBy(event.deltaY > 0 ? 1.25 : 0.8, pointed(event));
}, { passive: false });
frame.addEventListener("keydown", (event) => {
  const span = shown.to - shown.from, move = span / (event.shiftKey ? 10 : 100);
  const keys = { ArrowLeft: () => moveTo(shown.at - move), ArrowRight: () => moveTo(shown.at + move), Home: () => moveTo(0), End: () => moveTo(PARTS),
    "+": () => zoomBy(0.5), "=": () => zoomBy(0.5), "-": () => zoomBy(2), 0: () => show({ from: 0, to: PARTS }) };
  if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});
new ResizeObserver(() => { if (frame.clientWidth !== width) resize(); }).observe(frame);
/* The view that the address tells. */
function recall() {
  const range = (view.get("range") || "").split("-").map(Number), at = Number(view.get("at"));
  if (range.length === 2 && range[0] >= 0 && range[1] > range[0] && range[1] <= PARTS) zoom(...range);
  show({ at: view.has("at") && at >= 0 && at <= PARTS ? at : peakAt });
}
document.addEventListener("themed", () => { readInk(); paint(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readInk(); paint(); });
