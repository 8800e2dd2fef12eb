// The details of one node, which somebody has chosen on the map: its workers, its devices, and what can be done with it.

import { confirmed } from "./actions.js";
import { post } from "./api.js";
import { colour, letter } from "./colours.js";
import { byId, element, setText, showActions } from "./dom.js";
import { mayOperate } from "./rights.js";
import { count, si } from "./text.js";

/** Marks of the states of nodes. */
export const MARKS = {
  ready: "●", cordoned: "◐", draining: "◑", drained: "○", isolated: "⊘", lost: "✕", left: "–", unreachable: "?",
};
const EMPTY = { starting: "…", waiting: "…", isolated: "⊘", lost: "✕", left: "–" };
const RETURNS = new Set(["cordoned", "draining", "drained", "isolated"]);

let signature = "";

/** Show the details of a node; null: of none. */
export function showDetails(node) {
  byId("node-details").hidden = node === null;
  const next = JSON.stringify([node, mayOperate()]);
  if (node === null || next === signature) return;
  signature = next;
  setText(byId("node-heading"), `Node ${node.name}`);
  setText(byId("node-state"), `${MARKS[node.state] ?? "?"} ${node.state}${node.reason ? `: ${node.reason}` : ""}; failure domain ${node.domain}`);
  byId("node-workers").replaceChildren(...node.workers.map((worker) => workerItem(worker, node)));
  setText(byId("node-kinds"), kindsOf(node));
  byId("node-devices").replaceChildren(...node.devices.map(deviceItem));
  const found = RETURNS.has(node.state) ? [returnAction] : node.state === "ready" ? [drainAction] : [];
  showActions(byId("node-actions"), mayOperate() ? found.map((make) => make(node.name)) : []);
}

/** Return what the workers of a node are: the products of their devices, or the kind of workers without one. */
function kindsOf({ hardware, devices }) {
  const named = devices.filter(({ name }) => name !== "");
  if (!named.length) return hardware;
  const kinds = [...new Set(named.map(({ name, memory_bytes }) => `${name}, ${si(memory_bytes, "B")}`))];
  const drivers = [...new Set(named.map(({ driver }) => driver))].filter((driver) => driver !== "");
  return [...kinds, ...drivers.map((driver) => `driver ${driver}`)].join("; ");
}

/** Return how a device is: a healthy one as well, so that a hot or an idle one is seen beside it. */
function deviceItem(device) {
  const { temperature_c, utilisation_percent, memory_used_bytes, faults, notes } = device;
  const now = [
    temperature_c === null ? null : `${temperature_c} °C`,
    utilisation_percent === null ? null : `${utilisation_percent} % busy`,
    memory_used_bytes === null ? null : `${si(memory_used_bytes, "B")} used`,
  ].filter((part) => part !== null);
  const said = [...Object.entries(faults).map(([fault, times]) => `${fault} ${count(times, "time")}`), ...notes];
  return element("li", { class: said.length ? "said" : null, title: `${device.workers.join(", ")} ${device.uuid}`.trim() },
    `${device.device}: ${[...now, ...said].join(", ") || "nothing is known"}`);
}

function workerItem(worker, node) {
  const slow = worker.slowdown > 1;
  const use = worker.task === null ? "no task" : `task ${worker.task}, rank ${worker.rank}`;
  const device = node.devices.find((one) => one.device === worker.device);
  const on = device ? `device ${device.device}` : node.hardware;
  const text = `${worker.worker} (${on}): ${use}, ${worker.state}${slow ? `, ${worker.slowdown.toFixed(2)} times slower` : ""}`;
  const mark = worker.task === null ? EMPTY[worker.state] ?? "·" : letter(worker.task);
  const classes = ["worker", worker.task === null ? "" : colour(worker.task), slow ? "slow" : ""].join(" ").trim();
  return element("li", { class: classes, title: text },
    element("span", { "aria-hidden": "true" }, slow ? `${mark}!` : mark),
    element("span", { class: "visually-hidden" }, text));
}

function pathOf(name, request) {
  return `/v1/nodes/${encodeURIComponent(name)}/${request}`;
}

function returnAction(name) {
  const act = () => confirmed({
    heading: `Use node ${name} again?`, yes: "Return", done: `Node ${name} is used again.`,
    text: "It gets work again once its agent has passed its self-test.",
    send: () => post(pathOf(name, "return")),
  });
  return { text: "Return", label: `Return node ${name}`, act };
}

function drainAction(name) {
  const act = () => confirmed({
    heading: `Drain node ${name}?`, yes: "Drain", done: `Node ${name} is being drained.`, field: "reason",
    text: "Its tasks move to other nodes at their next step, or save their state and wait. It gets no new work.",
    send: (reason) => post(pathOf(name, "drain"), JSON.stringify({ reason })),
  });
  return { text: "Drain", label: `Drain node ${name}`, act };
}
