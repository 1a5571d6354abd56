/* Elements of the page: theme, long tables, navigation. Names are always inserted as text. */

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
/* Numbers as Python writes them, which rounds halves to even digits; JavaScript rounds them up. */
const whole = (x) => (Math.abs(x % 1) === 0.5 ? 2 * Math.round(x / 2) : x).toFixed(0);
function digits(x) {
  if (x >= 999.5) return whole(x);
  const half = /^(-?\d\.\d[02468])50*(e.*)$/.exec(x.toExponential(25));
  return String(Number(half ? half[1] + half[2] : x.toPrecision(3)));
}
function sizeText(bytes) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (bytes >= size) return `${digits(bytes / size)} ${unit}`;
  return `${whole(bytes)} B`;
}
function timeText(seconds) {
  for (const [unit, size] of [["s", 1], ["ms", 1e-3]])
    if (seconds >= size) return `${digits(seconds / size)} ${unit}`;
  return seconds && seconds < 5e-9 ? "< 0.01 us" : `${digits(seconds / 1e-6)} us`;
}
const grouped = new Intl.NumberFormat("en-US");
const count = (n) => grouped.format(n);
const several = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

/* -- the view in the address ------------------------------------------------------------- */

/* After the `#`: an op, or `name=value` pairs of what differs from the first view. */
const view = new Map(new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : ""));
let writing = 0;
function remember(name, value) {
  if ((view.get(name) || "") === value) return;
  if (value) view.set(name, value); else view.delete(name);
  clearTimeout(writing);
  writing = setTimeout(() => history.replaceState(null, "", `#${new URLSearchParams([...view])}`), 200);
}

/* -- theme ------------------------------------------------------------------------------- */

const themes = ["", "light", "dark"];
const root = document.documentElement;
function setTheme(theme) {
  if (theme) root.dataset.theme = theme;
  else delete root.dataset.theme;
  byId("theme").textContent = `Theme: ${theme || "system"}`;
  document.dispatchEvent(new Event("themed"));
}
let theme = "";
try { theme = localStorage.getItem("toast-theme") || ""; } catch { /* storage is unavailable */ }
setTheme(themes.includes(theme) ? theme : "");
byId("theme").addEventListener("click", () => {
  const next = themes[(themes.indexOf(root.dataset.theme || "") + 1) % themes.length];
  setTheme(next);
  try { localStorage.setItem("toast-theme", next); } catch { /* storage is unavailable */ }
});

/* -- copies ------------------------------------------------------------------------------ */

/* The clipboard needs a secure context; a selection can be copied by hand. */
async function copyText(button, source) {
  const says = button.textContent;
  getSelection().selectAllChildren(source);
  try { await navigator.clipboard.writeText(source.textContent); button.textContent = "Copied"; }
  catch { button.textContent = document.execCommand("copy") ? "Copied" : "Selected"; }
  setTimeout(() => { button.textContent = says; }, 1500);
}
for (const button of document.querySelectorAll("[data-copy]"))
  button.addEventListener("click", () => copyText(button, byId(button.dataset.copy)));

/* -- long and wide tables, and the navigation -------------------------------------------- */

for (const button of document.querySelectorAll(".show-more"))
  button.addEventListener("click", () => {
    const rows = byId(button.dataset.table).querySelectorAll("tr.more");
    for (const row of rows) row.hidden = false;
    for (const row of byId(button.dataset.table).querySelectorAll("tr.less")) row.remove();
    button.closest("p").remove();
    rows[0].querySelector("th").tabIndex = -1;
    rows[0].querySelector("th").focus();
  });
/* Content that is wider than its frame fades out at the edge. */
function fade(frame) {
  const sides = [];
  if (frame.scrollLeft > 1) sides.push("left");
  if (frame.scrollLeft + frame.clientWidth < frame.scrollWidth - 1) sides.push("right");
  if (sides.length) frame.dataset.more = sides.join(" "); else delete frame.dataset.more;
}
const resized = new ResizeObserver((entries) => requestAnimationFrame(() => {
  for (const e of entries) fade(e.target.closest(".scroll, nav ol") || e.target);
}));
function fading(frame) {
  frame.addEventListener("scroll", () => fade(frame), { passive: true });
  resized.observe(frame);
  if (frame.firstElementChild) resized.observe(frame.firstElementChild);
  return frame;
}
for (const frame of document.querySelectorAll(".scroll, nav ol")) fading(frame);

const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
const seen = new Set();
const watch = new IntersectionObserver((entries) => {
  for (const e of entries) e.isIntersecting ? seen.add(e.target.id) : seen.delete(e.target.id);
  const first = [...links.keys()].find((id) => seen.has(id));
  if (!first) return;
  for (const [id, link] of links)
    id === first ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
  /* Only the bar scrolls: scrolling to the link would interrupt the scrolling of the page. */
  const bar = links.get(first).closest("ol"), at = bar.getBoundingClientRect();
  const link = links.get(first).getBoundingClientRect();
  bar.scrollLeft += (link.left + link.right - at.left - at.right) / 2;
}, { rootMargin: "-10% 0px -60% 0px" });
for (const id of links.keys()) if (byId(id)) watch.observe(byId(id));
