/* The switch between plans: another plan beside that of the page, and what differs. */

const plans = data.plans;
const worded = { time: timeText, size: sizeText };
function ratioText(first, second) {
  if (!first || !second || Math.abs(second / first - 1) < 0.005) return "";
  return `${second > first ? "+" : "\u2212"}${digits(100 * Math.abs(second / first - 1))} %`;
}
function compareTable(caption, heads, rows) {
  if (!rows.length) return make("p", {}, `${caption}: no differences`);
  return fading(make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, make("table", {}, make("caption", {}, caption),
    make("thead", {}, make("tr", {}, heads.map(([text, kind]) => make("th", { scope: "col", class: kind || null }, text)))),
    make("tbody", {}, rows.map((cells) => make("tr", {}, cells.map((cell, i) => i ? make("td", { class: heads[i][1] || null }, cell) : make("th", { scope: "row" }, cell))))))));
}
const both = (a, b) => [...new Set([...Object.keys(a), ...Object.keys(b)])];
function bars(first, second) {
  const most = Math.max(first, second, 1e-300);
  const bar = (value, kind) => { const part = make("span", { class: kind }); part.style.width = `${100 * value / most}%`; return make("span", { class: "share" }, part); };
  return make("span", { class: "pair" }, bar(first, "products"), bar(second, "none-bar"));
}
function beside(k) {
  const mine = plans[0], other = plans[k];
  for (const [i, button] of [...byId("plans").querySelectorAll("button")].entries()) button.setAttribute("aria-pressed", String(i + 1 === k));
  const v = other.verdict, box = byId("beside");
  const heads = [["", ""], [mine.name, "num"], [other.name, "num"], ["", "bar"], ["difference", "num"]];
  const line = (name, unit, a, b) => [name, worded[unit](a), worded[unit](b), bars(a, b), ratioText(a, b)];
  const moved = both(mine.collectives, other.collectives).map((key) => [key, mine.collectives[key] || [0, 0, 0], other.collectives[key] || [0, 0, 0]]);
  box.replaceChildren(
    make("p", { class: `verdict ${v.grade}-verdict` }, make("span", {}, make("strong", {}, other.name)), make("span", {}, v.text)),
    compareTable(`Time and memory of ${mine.name} and ${other.name}`, heads, [
      ...mine.numbers.map(([name, unit, a], i) => line(name, unit, a, other.numbers[i][2])),
      ...both(mine.memory, other.memory).map((name) => line(`${name} at the peak`, "size", mine.memory[name] || 0, other.memory[name] || 0))]),
    compareTable(`Arguments that ${other.name} shards in another way`, [["argument", ""], [mine.name, ""], [other.name, ""]],
      both(mine.arguments, other.arguments).filter((path) => mine.arguments[path] !== other.arguments[path])
        .map((path) => [make("code", {}, path), make("code", {}, mine.arguments[path] || "-"), make("code", {}, other.arguments[path] || "-")])),
    compareTable(`Collectives of ${mine.name} and ${other.name}`, [["kind and axes", ""], [mine.name, "num"], ["time", "num"], [other.name, "num"], ["time", "num"], ["", "bar"]],
      moved.map(([key, a, b]) => [key, count(a[0]), timeText(a[2]), count(b[0]), timeText(b[2]), bars(a[2], b[2])])));
  remember("beside", other.name);
}
if (plans.length) {
  plans.slice(1).forEach((plan, i) => byId("plans").append(make("button", { type: "button", "aria-pressed": "false", onclick: () => beside(i + 1) }, plan.name)));
  beside(Math.max(1, plans.findIndex((plan, i) => i && plan.name === view.get("beside"))));
}
