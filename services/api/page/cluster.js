// The map: nodes, and their workers with the colour and letter of their tasks.

import { confirmed } from "./actions.js";
import { post } from "./api.js";
import { colour, letter } from "./colours.js";
import { byId, element, keyed, setText, showActions } from "./dom.js";
import { mayOperate } from "./rights.js";
import { count, si } from "./text.js";

const MARKS = {
  ready: "●", cordoned: "◐", draining: "◑", drained: "○", isolated: "⊘", lost: "✕", left: "–", unreachable: "?",
};
const TROUBLE = new Set(["isolated", "lost", "unreachable"]);
const EMPTY = { starting: "…", waiting: "…", isolated: "⊘", lost: "✕", left: "–" };
const ORDER = new Intl.Collator("en", { numeric: true }); // n2 before n10
const RETURNS = new Set(["cordoned", "draining", "drained", "isolated"]);

/** Show the nodes: those that are away first, then by their names. `more`: there are further ones. */
export function showNodes({ items, more }) {
  const shown = items.filter((node) => node.state !== "left").sort((one, other) =>
    isAway(other) - isAway(one) || ORDER.compare(one.name, other.name));
  keyed(byId("nodes"), shown, {
    key: (node) => node.name,
    make: makeNode,
    update: fillNode,
    shown: ({ state, reason, hardware, workers, devices }) =>
      [state, reason, hardware, devices, workers, workers.map(({ task }) => task && letter(task)), mayOperate()],
  });
  const trouble = shown.filter(isAway).length;
  const busy = shown.flatMap((node) => node.workers).filter((worker) => worker.task !== null).length;
  const workers = shown.reduce((sum, node) => sum + node.workers.length, 0);
  const parts = [count(shown.length, "node"), `${busy} of ${count(workers, "worker")} in use`];
  if (trouble) parts.push(`${trouble} lost, isolated or unreachable`);
  if (more) parts.push("further nodes are not shown: the command unicron nodes lists all");
  setText(byId("cluster-text"), `${parts.join(", ")}.`);
}

function isAway(node) {
  return TROUBLE.has(node.state);
}

function makeNode(node) {
  const name = node.name;
  return element("li", { class: "node" },
    element("h3", {}, name), element("p"), element("ul", { class: "workers", "aria-label": `workers of ${name}` }),
    element("p", { class: "quiet" }), element("ul", { class: "devices", "aria-label": `devices of ${name}` }),
    element("p", { class: "node-actions" }));
}

function fillNode(item, node) {
  const [, state, workers, kinds, devices, actions] = item.children;
  item.className = isAway(node) ? "node trouble" : "node";
  state.textContent = `${MARKS[node.state] ?? "?"} ${node.state}${node.reason ? `: ${node.reason}` : ""}`;
  workers.replaceChildren(...node.workers.map((worker) => workerItem(worker, node)));
  kinds.textContent = kindsOf(node);
  devices.replaceChildren(...node.devices.map(deviceItem));
  const found = RETURNS.has(node.state) ? [returnAction] : node.state === "ready" ? [drainAction] : [];
  showActions(actions, mayOperate() ? found.map((make) => make(node.name)) : []);
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
