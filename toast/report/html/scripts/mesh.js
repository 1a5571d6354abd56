/* The mesh: devices colored by the shards of an argument. */

const devices = [...document.querySelectorAll(".device")];
const numbers = devices.map((device) => device.querySelector("text").textContent);
const meshAxes = data.mesh.some(([, size]) => size > 1) ? data.mesh.filter(([, size]) => size > 1) : data.mesh.slice(-1);
/* The shard of an argument that a device has, by dimension. */
function shardOf(argument, place) {
  return argument.axes.map((axes) => axes.reduce((shard, axis) => {
    const at = meshAxes.findIndex(([name]) => name === axis);
    return at < 0 ? shard : shard * meshAxes[at][1] + place[at];
  }, 0));
}
function colorDevices() {
  const argument = data.arguments[byId("shards").value];
  devices.forEach((device, i) => {
    let number = 0;
    if (argument) shardOf(argument, device.dataset.at.split(",").map(Number)).forEach((shard, d) => { number = number * argument.shards[d] + shard; });
    device.setAttribute("class", argument ? `device c${number % 12}` : "device");
    device.querySelector("text").textContent = argument ? String(number) : numbers[i];
  });
  const shards = argument ? argument.shards.reduce((a, b) => a * b, 1) : 0;
  byId("shards-text").textContent = argument ? `${several(shards, "shard")}: devices with one number have the same` : "";
  remember("shards", byId("shards").value);
}
if (view.has("shards")) byId("shards").value = view.get("shards");
byId("shards").addEventListener("change", colorDevices);
colorDevices();
