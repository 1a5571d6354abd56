/* Unpacks the program from its columns, and formats its parts. */

function unrolled(runs, Kind = Int32Array) {
  let length = 0;
  for (let i = 1; i < runs.length; i += 2) length += runs[i];
  const values = new Kind(length);
  for (let i = 0, at = 0; i < runs.length; i += 2) {
    values.fill(runs[i], at, at + runs[i + 1]);
    at += runs[i + 1];
  }
  return values;
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
/* The op that defines a value, and the number of its result. */
const definition = (value) => [valueOp[value], value - firstValue[valueOp[value]]];
function defNames(value) {
  const [op, result] = definition(value);
  return signature(op)[4][result][1].map((factor) => firstName[op] + factor);
}
const useNames = (op, i) => signature(op)[3][i][1].map((factor) => firstName[op] + factor);
const typeOf = (value) => {
  const [op, result] = definition(value);
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
/* A path with dots, as on the command line: params.layers[3].wq. */
const dotted = (path) => path.replace(/\[(['"])(.*?)\1\]/g, ".$2");
const pathText = (op) => isArgument(op) ? listing.arguments[op]
  : isResult(op) ? listing.results[op - listing.first_return] : "";
/* Names as in `toast explain`: dot_general#15, arguments, values with a unique name, and %12. */
const opName = (op) => `${kindOf(op)}#${op}`;
const valueText = (value) => isArgument(valueOp[value]) ? listing.arguments[valueOp[value]]
  : listing.names[value] || `%${value}`;
/* The number of an op is that of its first result, as in MLIR. */
const numberText = (op) => firstValue[op] < firstValue[op + 1] ? `%${firstValue[op]}` : `#${op}`;
const reshards = new Map(), moves = new Map(), spent = new Map();
const torn = new Map(); /* the conflicts of each op, by operand; -1 is the result */
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
    const [op, operand] = Array.isArray(site) ? site : [valueOp[site], -1];
    if (!torn.has(op)) torn.set(op, []);
    torn.get(op).push([i, operand]);
  }
});
const moveText = (kind, axes) => `${listing.move_kinds[kind]} ${listing.move_axes[axes].join("\u00d7")}`;
const moveSeconds = (op) => (moves.get(op) || []).reduce((sum, m) => sum + m[5], 0);
function seconds(op) {
  const [products, memory] = spent.get(op) || [0, 0];
  return products + memory + moveSeconds(op);
}
const sectionOf = (op) => listing.sections.findIndex((s) => s.start <= op && op < s.stop);

const colorLabel = (c) => listing.color_label[c], colorKind = (c) => listing.color_kind[c];
const colorName = (c) => data.colors[colorKind(c)].name;
/* A size with the letter and tint of its color, and its mesh axes. */
function chip(size, color, axes = []) {
  const known = color >= 0;
  return make("span", { class: "dim" + (known ? ` c${colorKind(color) % 12}` : ""),
    title: known ? `color ${colorLabel(color)}${colorName(color) ? `, ${colorName(color)}` : ""}${axes.length ? `, sharded over ${axes.join(" and ")}` : ""}` : "never sharded" },
    String(size), known ? make("sup", {}, colorLabel(color)) : "",
    axes.length ? make("span", { class: "on" }, axes.map((a) => make("i", {}, a))) : "");
}
function typeChips([dtype, shape], names, spec) {
  return [make("code", {}, dtype), ...shape.map((size, d) => chip(size, colorOf[names[d]], (spec && spec[d]) || []))];
}
const specOf = (value) => listing.specs[valueSpec[value]];
