/* The list of conflicts, and the dimension graph around one of them. */

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
const folded = (text) => text.replace(/\[\d+\]/g, "[*]")
  .replace(/[A-Za-z_]\w*(?:\.\w+)+/g, (path) => path.replace(/\.\d+(?=\.|$)/g, ".*"));
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
    const button = make("button", { type: "button", "aria-pressed": "false", onclick: () => chosen(members[0]) }, folded(conflictText(members[0])));
    conflictButtons.set(members, button);
    body.append(make("tr", {}, make("th", { scope: "row" }, button),
      make("td", { class: "num" }, String(members[0])), make("td", {}, make("small", {}, `${placeText(op)} ${listing.sections[sectionOf(op)].phase}`)),
      make("td", { class: "num alike" }, count(members.length))));
  }
  byId("conflict-list").append(make("table", {}, make("caption", {}, `${several(groups.length, "kind")} of conflicts`),
    make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "names"), make("th", { scope: "col", class: "num" }, "number"), make("th", { scope: "col" }, "source"),
      make("th", { scope: "col", class: "num" }, "count"))), body));
}
/* The dimension graph: an edge from each definition of a value to each use. */
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
/* The shortest path between two names along edges in either direction, and the neighbours of its ends. */
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
/* Layers by the longest path from the top; names in conflict share a layer. */
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
  for (const n of [...nodes].reverse()) { /* sources are just above their successors */
    const below = edges.filter(([a]) => a === n).map(([, b]) => layer.get(b));
    if (below.length && !bound.has(n)) layer.set(n, Math.min(...below) - 1);
  }
  return layer;
}
/* Positions of names: each is as close to its neighbours above and below as possible. */
function placed({ nodes, edges }) {
  const kept = new Set(nodes);
  const pairs = data.conflicts.filter(([a, b]) => kept.has(a) && kept.has(b));
  let layer = layers(nodes, edges, pairs);
  /* If a path leads from one name of a conflict to the other, they cannot share a layer. */
  if (!layer) layer = layers(nodes, edges, []);
  /* Long edges have a point in every layer that they cross, so they go around names. */
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
  const part = around(name, other);
  const { at, chains, width, height } = placed(part);
  const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `Dimension graph around ${nameText(name)} and ${nameText(other)}` },
    draw("desc", {}, "Definitions are above, uses below. The list after the graph has the same edges as text."),
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
    svg.append(draw("path", { class: "edge" + (part.onWay.has(`${from},${to}`) ? " way" : ""), "marker-end": "url(#arrow)", d }));
  }
  const kept = new Set(part.nodes);
  for (const [a, b] of data.conflicts) {
    if (!kept.has(a) || !kept.has(b)) continue;
    const [[x, y], [u, v]] = [at.get(a), at.get(b)].sort((p, q) => p[0] - q[0]);
    const far = y === v && u - x > 1.5 * (W + GX);
    const d = far ? `M${x} ${y + H}C${x + 40} ${y + H + 26} ${u - 40} ${v + H + 26} ${u} ${v + H}`
      : u - x >= W ? `M${x + W / 2} ${y + H / 2}L${u - W / 2} ${v + H / 2}` : `M${x} ${y + H}L${u} ${v}`;
    svg.append(draw("path", { class: "torn-edge", d }));
  }
  for (const n of part.nodes) {
    const op = opOfName(n), [x, y] = at.get(n), c = colorOf[n];
    const axes = listing.holdings[held[n]];
    const text = nameText(n);
    const second = `${isArgument(op) ? "argument" : numberText(op)}${axes.length ? `, on ${axes.join("\u00d7")}` : ", not sharded"}`;
    svg.append(draw("g", { class: "node" + (n === name || n === other ? " torn" : "") },
      draw("a", { href: `#op-${op}`, "aria-label": `${text}, ${second}` },
        draw("title", {}, `${text} ${numberText(op)} ${placeText(op)}`),
        draw("rect", { x: x - W / 2, y, width: W, height: H, rx: 5 }),
        draw("text", { x, y: y + 16, "text-anchor": "middle" }, shortened(text, 22)),
        draw("text", { x, y: y + 31, "text-anchor": "middle", class: "small" }, shortened(`${c >= 0 ? `${colorLabel(c)}, ` : ""}${second}`, 25)))));
  }
  return { svg, part };
}
const shortened = (text, most) => (text.length <= most ? text : `\u2026${text.slice(1 - most)}`);
function chosen(i) {
  remember("conflict", String(i));
  choose(i);
}
function choose(i) {
  const [name, other, set, group, sites] = data.conflicts[i];
  const members = groupOf.get(i), at = members.indexOf(i);
  for (const [key, button] of conflictButtons) button.setAttribute("aria-pressed", String(key === members));
  const { svg, part } = graphOf(name, other);
  const view = byId("conflict-view");
  const list = make("dl", {});
  const add = (term, ...content) => list.append(make("dt", {}, term), make("dd", {}, ...content));
  for (const site of sites.slice(0, 4)) {
    const op = siteOp(site), use = Array.isArray(site);
    const value = use ? listing.operands[op][site[1]] : site;
    add("tensor", ...typeChips(typeOf(value), use ? useNames(op, site[1]) : defNames(value), null),
      use ? ` as operand ${site[1]} of ` : " defined by ", make("a", { href: `#op-${op}` }, opName(op)), ` ${placeText(op)}`);
  }
  const axesOf = (n) => listing.holdings[held[n]].join(" and ") || "no axis";
  add("the plan", `${nameText(name)} (${numberText(opOfName(name))}) has ${axesOf(name)}; ${nameText(other)} (${numberText(opOfName(other))}) has ${axesOf(other)}`);
  add("resolved with", `compatibility set ${set}, resolution group ${group}`);
  add("explained by", make("code", {}, `${data.explain} --conflict ${i}`));
  const turn = (step) => chosen(members[(at + step + members.length) % members.length]);
  view.replaceChildren(make("h3", {}, `Conflict ${i}: ${conflictText(i)}`),
    members.length > 1 ? make("div", { class: "steps" },
      make("button", { type: "button", id: "conflict-back", onclick: () => { turn(-1); byId("conflict-back").focus(); } }, "Previous"),
      `${at + 1} of ${members.length} similar`,
      make("button", { type: "button", id: "conflict-next", onclick: () => { turn(1); byId("conflict-next").focus(); } }, "Next")) : "",
    make("div", { class: "detail" }, list),
    make("div", { class: "graph", tabindex: "0", role: "region", "aria-label": "Dimension graph" }, svg),
    make("small", {}, "Red: the two dimensions in conflict. Dashed: conflicts. Bold: the shortest path between them" +
      (part.cut ? `, without ${several(part.cut, "step")} in the middle.` : ".")),
    make("details", {}, make("summary", {}, "Edges as a list"), make("ul", {}, part.edges.map(([a, b]) =>
      make("li", {}, make("code", {}, `${nameText(a)} (${numberText(opOfName(a))}) \u2192 ${nameText(b)} (${numberText(opOfName(b))})`))))));
  /* Fit the width as far as the text stays readable. */
  const drawn = view.querySelector(".graph svg");
  drawn.style.maxWidth = `${drawn.getAttribute("width")}px`;
  drawn.style.minWidth = `${0.8 * drawn.getAttribute("width")}px`;
  const frame = view.querySelector(".graph"), ends = [...drawn.querySelectorAll(".node.torn rect")].map((r) => r.getBoundingClientRect());
  const top = frame.getBoundingClientRect();
  frame.scrollTop += (ends[0].top + ends[ends.length - 1].bottom) / 2 - top.top - top.height / 2;
  frame.scrollLeft += (Math.min(...ends.map((e) => e.left)) + Math.max(...ends.map((e) => e.right))) / 2 - top.left - top.width / 2;
  view.dataset.conflict = String(i);
}
/* Show an interesting conflict first: resolved by the plan, at a product, in many layers. */
const worth = (members) => members.length + (held[data.conflicts[members[0]][0]] !== held[data.conflicts[members[0]][1]] ? 1e7 : 0) + (placeText(siteOp(data.conflicts[members[0]][4][0])) ? 1e6 : 0) +
  (members.some((i) => siteOp(data.conflicts[i][4][0]) < ops && kindOf(opOfName(data.conflicts[i][0])) === "dot_general") ? 1e8 : 0);
/* The graph is drawn when it comes into view: it needs all edges of the program. */
function firstGraph() {
  const asked = Number(view.get("conflict"));
  if (byId("conflict-view").dataset.conflict) return;
  choose(view.has("conflict") && data.conflicts[asked] ? asked : groups.reduce((a, b) => (worth(b) > worth(a) ? b : a))[0]);
}
if (data.conflicts.length) {
  const near = new IntersectionObserver((entries) => {
    if (!entries.some((e) => e.isIntersecting)) return;
    near.disconnect();
    firstGraph();
  }, { rootMargin: "50%" });
  near.observe(byId("conflicts"));
  window.addEventListener("beforeprint", firstGraph);
}
