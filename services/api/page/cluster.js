// The map: all nodes by failure domain, with the task of each worker; many nodes as a heat map. A node that is chosen
// shows its details. The keyboard enters the map once, and moves in it with the arrow keys.

import { sayWhyNot } from "./actions.js";
import { colour, letter } from "./colours.js";
import { byId, element, keyed, setText } from "./dom.js";
import { choose, chosen } from "./lists.js";
import { MARKS, showDetails } from "./node_details.js";
import { count } from "./text.js";

const MOST_CELLS = 256; // with names and workers; more are a heat map
const MOST_NAME = 5; // characters of a name in a cell: of a longer one the end, by which nodes mostly differ
const TROUBLE = new Set(["isolated", "lost", "unreachable"]);
const IN_TROUBLE = "in trouble";
const ORDER = new Intl.Collator("en", { numeric: true }); // n2 before n10
const FILTERS = ["state", "task", "domain"];

let known = { nodes: [], slow: {}, node: null };
let current = ""; // name of the node by which the keyboard enters the map

/** Return the nodes of an answer, in the order of the map: by failure domain and name. */
export function nodesOf(map) {
  const nodes = map.names.map((name, index) => ({
    name,
    state: map.state_names[map.states[index]],
    domain: map.domain_names[map.domains[index]],
    reason: map.reasons[name] ?? "",
    runs: runsOf(map, map.workers[index]),
  }));
  return nodes.sort((one, other) => ORDER.compare(one.domain, other.domain) || ORDER.compare(one.name, other.name));
}

function runsOf(map, numbers) {
  const runs = [];
  for (let index = 0; index < numbers.length; index += 3) {
    const [task, use, number] = numbers.slice(index, index + 3);
    runs.push({ task: task < 0 ? null : map.task_names[task], use: map.use_names[use], number });
  }
  return runs;
}

/** Show the map. `nodes`: as of `nodesOf`; `slow`: worker -> slowdown; `node`: details of the chosen one, or null. */
export function showNodes(found) {
  known = found;
  const { nodes, slow, node } = found;
  showFilters(nodes);
  const slowNodes = new Set(Object.keys(slow).map((worker) => worker.split("/")[0]));
  const shown = nodes.filter(isWanted);
  const heat = shown.length > MOST_CELLS;
  byId("node-map").classList.toggle("heat", heat);
  const racks = new Map(shown.map(({ domain }) => [domain, []]));
  for (const one of shown) racks.get(one.domain).push(one);
  byId("node-map").classList.toggle("one-rack", racks.size === 1);
  keyed(byId("node-map"), [...racks], {
    key: ([domain]) => domain,
    make: ([domain]) => element("div", { class: "rack", role: "group", "aria-label": domain },
      element("span", { class: "rack-name", "aria-hidden": "true", title: domain }, domain), element("div", { class: "cells" })),
    update: (rack, [, members]) => keyed(rack.lastChild, members, {
      key: ({ name }) => name,
      make: makeCell,
      update: (cell, one) => fillCell(cell, one, { heat, slow: slowNodes.has(one.name) }),
      shown: (one) => [one, heat, slowNodes.has(one.name), chosen() === one.name],
    }),
    shown: ([, members]) => [members, heat, [...slowNodes], chosen()],
  });
  enterAt(current);
  showDetails(node);
  setText(byId("cluster-text"), words(nodes, shown));
}

function words(nodes, shown) {
  const runs = nodes.flatMap((node) => node.runs);
  const sum = (some) => some.reduce((workers, { number }) => workers + number, 0);
  const parts = [count(nodes.length, "node"), `${sum(runs.filter(({ task }) => task !== null))} of ${count(sum(runs), "worker")} in use`];
  const trouble = nodes.filter(({ state }) => TROUBLE.has(state)).length;
  if (trouble) parts.push(`${trouble} lost, isolated or unreachable`);
  if (shown.length < nodes.length) parts.push(`${shown.length} shown`);
  return `${parts.join(", ")}.`;
}

/** Return what there is room for of a name. */
function short(name) {
  return name.length <= MOST_NAME ? name : `…${name.slice(1 - MOST_NAME)}`;
}

function makeCell({ name }) {
  const cell = element("button", { type: "button", class: "cell", tabindex: "-1", "data-name": name });
  cell.addEventListener("click", () => open(name));
  return cell;
}

function fillCell(cell, node, { heat, slow }) {
  const trouble = TROUBLE.has(node.state);
  const main = [...node.runs].sort((one, other) => other.number - one.number).find(({ task }) => task !== null);
  const text = labelOf(node, slow);
  const classes = ["cell", trouble ? "trouble" : "", slow ? "slow" : "", heat && main && !trouble ? colour(main.task) : ""];
  cell.className = classes.filter((name) => name).join(" ");
  cell.setAttribute("aria-label", text);
  cell.setAttribute("aria-pressed", String(chosen() === node.name));
  cell.title = text;
  const mark = node.state === "ready" ? "" : MARKS[node.state] ?? "?";
  if (heat) cell.replaceChildren(mark);
  else cell.replaceChildren(`${mark}${short(node.name)}${slow ? "!" : ""}`, ...node.runs.flatMap(squares));
}

/** Return a square for each worker of a run; the first one has the letter, for which one square may be too narrow. */
function squares({ task, number }) {
  const kind = task === null ? {} : { class: colour(task) };
  return Array.from({ length: number }, (_, index) => element("i", kind, index ? "" : task === null ? "·" : letter(task)));
}

function labelOf({ name, state, reason, runs }, slow) {
  const uses = runs.map(({ task, use, number }) => `${number} ${use}${task === null ? " without a task" : ` ${task}`}`);
  return `${name}: ${state}${reason ? `, ${reason}` : ""}; ${uses.join(", ") || "no workers"}${slow ? "; a worker is slow" : ""}`;
}

// ---- filters

function showFilters(nodes) {
  const tasks = new Set(nodes.flatMap(({ runs }) => runs.map(({ task }) => task)).filter((task) => task !== null));
  const values = {
    state: [IN_TROUBLE, ...new Set(nodes.map(({ state }) => state))],
    task: ["no task", ...[...tasks].sort(ORDER.compare)],
    domain: [...new Set(nodes.map(({ domain }) => domain))],
  };
  for (const name of FILTERS) {
    keyed(byId(`filter-${name}`), ["all", ...values[name]], { key: (text) => text, make: (text) => element("option", {}, text) });
  }
}

function valueOf(filter) {
  return byId(`filter-${filter}`).selectedIndex > 0 ? byId(`filter-${filter}`).value : null;
}

function isWanted({ name, state, domain, runs }) {
  const [wantedState, wantedTask, wantedDomain] = FILTERS.map(valueOf);
  const text = byId("filter-name").value.trim().toLowerCase();
  return (wantedState === null || wantedState === state || (wantedState === IN_TROUBLE && TROUBLE.has(state)))
    && (wantedTask === null || runs.some(({ task }) => (task ?? "no task") === wantedTask))
    && (wantedDomain === null || wantedDomain === domain)
    && name.toLowerCase().includes(text);
}

for (const name of [...FILTERS, "name"]) byId(`filter-${name}`).addEventListener("input", () => showNodes(known));

// ---- the keyboard, and the node that is chosen

function cells() {
  return [...byId("node-map").querySelectorAll(".cell")];
}

/** Have the keyboard enter the map at a node, or at the first one. */
function enterAt(name) {
  const all = cells();
  const at = all.find((cell) => cell.dataset.name === name) ?? all[0];
  for (const cell of all) if (cell !== at && cell.tabIndex === 0) cell.tabIndex = -1;
  if (at) at.tabIndex = 0;
}

/** Return the cell that an arrow key leads to from another. */
function beside(cell, key) {
  const all = cells();
  const index = all.indexOf(cell);
  if (key === "Home") return all[0];
  if (key === "End") return all.at(-1);
  if (key === "ArrowLeft" || key === "ArrowRight") return all[index + (key === "ArrowLeft" ? -1 : 1)];
  const { x, y } = cell.getBoundingClientRect();
  const places = all.map((one) => ({ one, box: one.getBoundingClientRect() }));
  const beyond = places.filter(({ box }) => key === "ArrowUp" ? box.y < y - 1 : box.y > y + 1);
  const distance = ({ box }) => Math.abs(box.y - y) * 1000 + Math.abs(box.x - x); // of the next line, the nearest
  return beyond.sort((one, other) => distance(one) - distance(other))[0]?.one;
}

byId("node-map").addEventListener("keydown", (event) => {
  const cell = event.target.closest(".cell");
  if (cell === null || !/^(Arrow|Home$|End$)/.test(event.key)) return;
  event.preventDefault();
  const next = beside(cell, event.key);
  if (!next) return;
  current = next.dataset.name;
  enterAt(current);
  next.focus();
});

async function open(name) {
  current = name;
  enterAt(name);
  try {
    const node = await choose(name);
    if (node === null) return;
    showNodes({ ...known, node });
    byId("node-heading").focus();
  } catch (error) {
    sayWhyNot(error);
  }
}

function close() {
  choose(null);
  showNodes({ ...known, node: null });
  cells().find((cell) => cell.tabIndex === 0)?.focus();
}

byId("node-close").addEventListener("click", close);
byId("node-details").addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
