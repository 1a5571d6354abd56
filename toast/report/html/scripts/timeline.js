/* Memory: the live bytes at the selected op. */

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
    `${sizeText(liveAt(data.memory.before, op))} unsharded. ${[kindOf(op), placeText(op)].filter(Boolean).join(" ")}, ` +
    [section.phase, section.title].filter(Boolean).join(" ");
  moment.setAttribute("aria-valuetext", byId("moment-text").textContent);
  for (const chart of document.querySelectorAll(".timeline")) {
    for (const end of ["x1", "x2"]) chart.querySelector(".cursor").setAttribute(end, `${100 * op / ops}%`);
    chart.classList.add("reading");
  }
}
moment.addEventListener("input", () => read(Number(moment.value)));
for (const chart of document.querySelectorAll(".timeline"))
  chart.addEventListener("pointermove", (event) => {
    const frame = chart.getBoundingClientRect(), at = (event.clientX - frame.left) / frame.width;
    moment.value = Math.max(0, Math.min(ops - 1, Math.round(at * ops)));
    read(Number(moment.value));
  });
if (ops) read(Number(moment.value));
