// The table of tasks.

import { confirmed, sayWhyNot } from "./actions.js";
import { patch, post, remove, tagged } from "./api.js";
import { badge, letter } from "./colours.js";
import { byId, element, keyed, setText, showActions, tableRow } from "./dom.js";
import { isOpen } from "./incidents.js";
import { reference } from "./links.js";
import { taskAddress, taskName } from "./place.js";
import { mayChange } from "./rights.js";
import { clock, duration, si } from "./text.js";

const ENDED = new Set(["stopped", "succeeded", "failed"]);
const WAITS = new Set(["pending", "queued"]);
const SIGNS = { failed: "▲ ", degraded: "△ ", queued: "△ " };
const RANKS = { failed: 0, degraded: 1, queued: 2 };
const LAST = 4; // of tasks that have ended in order; before them, those that go on
const MOST_REASON = 160; // characters that are read at a glance: three lines
const MOST_HIT = 3;
const FEW = 12; // tasks that are shown at first: nodes and chart are not far below
const CHANGED = 412; // since it was read
const CELLS = [
  ["task"], ["state", "text"], ["step", "n"], ["loss", "n"], ["workers", "n"], ["throughput", "n"], ["left", "n wide"],
  ["weight", "n"], ["action", "actions"],
];

let all = false; // whether more than a few are shown
let showAgain = () => {};

/** Show tasks: what needs somebody first. `incidents`: those that are known; `known`: whether lists have more. */
export function showTasks(tasks, incidents, lists) {
  showAgain = () => showTasks(tasks, incidents, lists);
  for (const task of tasks) if (!ENDED.has(task.state)) letter(task.name); // colours by the order of the table
  // A task moves when its rank changes, and stays where it is meanwhile.
  const rows = tasks.map((task) => ({ task, hit: hitBy(task, incidents) })).sort((one, other) => rank(one.task) - rank(other.task));
  keyed(byId("task-rows"), all ? rows : rows.slice(0, FEW), { key: ({ task }) => task.name, make: ({ task }) => makeRow(task), update: fillRow, shown });
  byId("no-tasks").hidden = tasks.length > 0;
  byId("all-tasks").hidden = rows.length <= FEW;
  setText(byId("all-tasks"), all ? "Show fewer" : `Show all ${rows.length}`);
  const { going, failed, finished } = lists;
  setText(byId("more-tasks"), moreTasks([[going, "task that goes on", "tasks that go on"], [failed, "failed task"], [finished, "other ended task"]]));
}

byId("all-tasks").addEventListener("click", () => {
  all = !all;
  showAgain();
});

function moreTasks(lists) {
  const found = lists.filter(([{ more }]) => more).map(([{ items }, one, several = `${one}s`]) => `${items.length} ${items.length === 1 ? one : several}`);
  return found.length ? `Only the newest ${found.join(", ")} are shown; the command unicron ps lists all.` : "";
}

/** Return the incidents to name beside a task: the open ones that hit it, and the newest others. */
function hitBy(task, incidents) {
  const hit = incidents.filter(({ tasks }) => tasks.includes(task.name));
  const sorted = hit.sort((one, other) => isOpen(other) - isOpen(one) || other.detected_at.localeCompare(one.detected_at));
  return sorted.slice(0, MOST_HIT).map((incident) => ({ id: incident.id, open: isOpen(incident) }));
}

function rank({ state }) {
  return RANKS[state] ?? (ENDED.has(state) ? LAST : LAST - 1);
}

function shown({ task, hit }) {
  return [cells(task).map(String), troubles(task), task.state, hit, mayChange(task)];
}

function cells(task) {
  const of = task.steps === null ? "" : ` / ${task.steps.toLocaleString("en")}`;
  const step = task.steps === null && task.step === 0 ? "–" : `${task.step.toLocaleString("en")}${of}`;
  return [
    step,
    task.loss === null ? "–" : task.loss.toPrecision(4),
    task.workers,
    task.throughput_flop_per_s ? si(task.throughput_flop_per_s, "FLOP/s") : "–",
    left(task),
    task.weight,
  ];
}

/** Return how long a task still trains, if it trains. */
function left(task) {
  if (ENDED.has(task.state)) return task.ended_at ? `ended ${clock(task.ended_at)}` : "–";
  if (WAITS.has(task.state) || task.workers === 0) return "waits";
  return duration(task.step_s && task.steps !== null ? (task.steps - task.step) * task.step_s : null);
}

function troubles(task) {
  const found = [];
  if (task.deleted_at) found.push(`deleted at ${clock(task.deleted_at)}: it is in no list`);
  if (task.reason) found.push(task.reason);
  if (task.wait?.until) found.push(`starts again at ${clock(task.wait.until)}${task.wait.reason === task.reason ? "" : `: ${task.wait.reason}`}`);
  if (task.stop_refused) found.push(`not stopped: ${task.stop_refused.reason}`);
  const failure = task.checkpoint_failure;
  if (failure && !task.reason?.includes(failure.reason)) found.push(`checkpoint of step ${failure.step}: ${failure.reason}`);
  const lack = task.copies_lacking;
  if (lack) found.push(`copies in memory are missing since step ${lack.step}: ${lack.reason}`);
  for (const anomaly of task.anomalies) {
    found.push(`${anomaly.kind}: ${si(anomaly.value, anomaly.unit)}, expected ${si(anomaly.expected, anomaly.unit)}`);
  }
  for (const [worker, slowdown] of Object.entries(task.slow_workers)) {
    found.push(`${worker} is ${slowdown.toFixed(2)} times slower`);
  }
  return found;
}

function makeRow(task) {
  const row = tableRow(CELLS, { heading: true });
  row.firstChild.append(badge(task.name), taskName === null ? element("a", { href: taskAddress(task.name) }, task.name) : task.name);
  row.children[1].append(element("span", { class: "state" }), element("div"), element("div"));
  return row;
}

function fillRow(row, { task, hit }) {
  const [, state, ...rest] = row.children;
  const action = rest.pop();
  const [name, reasons, incidents] = state.children;
  name.textContent = `${SIGNS[task.state] ?? ""}${task.state}`;
  keyed(reasons, troubles(task), { key: (text) => text, make: reason });
  keyed(incidents, hit, { key: ({ id }) => id, make: incidentLine, update: (line, { open }) => { line.lastChild.textContent = open ? " is open" : ""; } });
  cells(task).forEach((text, index) => { rest[index].textContent = String(text); });
  row.className = task.state;
  showActions(action, actionsOf(task));
}

function actionsOf(task) {
  if (!mayChange(task) || task.state === "stopping" || task.deleted_at) return [];
  if (!ENDED.has(task.state)) return [weightAction(task.name), stopAction(task.name)];
  return [...(task.state === "succeeded" ? [] : [resumeAction(task.name)]), deleteAction(task.name)];
}

/** Return a reason: its beginning, and the rest for whoever opens it. */
function reason(text) {
  const line = text.split("\n", 1)[0];
  if (line === text && text.length <= MOST_REASON) return element("div", { class: "reason" }, text);
  return element("details", { class: "reason" },
    element("summary", {}, `${line.slice(0, MOST_REASON)} …`), element("div", { class: "words" }, text));
}

function incidentLine({ id }) {
  return element("div", { class: "quiet" }, "incident ", reference("incident", id), element("span"));
}

function pathOf(name) {
  return `/v1/tasks/${encodeURIComponent(name)}`;
}

function stopAction(name) {
  const act = () => confirmed({
    heading: `Stop task ${name}?`,
    text: "It stops after its present step, with a checkpoint from which a later submission of the name goes on.",
    yes: "Stop",
    done: `Task ${name} is asked to stop.`,
    send: () => post(`${pathOf(name)}/stop`),
  });
  return { text: "Stop", label: `Stop task ${name}`, act };
}

/** Return the action by which a task that was stopped, has failed or waits for somebody goes on. */
export function resumeAction(name) {
  const act = () => confirmed({
    heading: `Resume task ${name}?`,
    text: "It goes on from its newest checkpoint, with its last specification. If it has failed, mend the cause before: else it fails again.",
    yes: "Resume",
    done: `Task ${name} goes on.`,
    send: () => post(`${pathOf(name)}/resume`),
  });
  return { text: "Resume", label: `Resume task ${name}`, act };
}

function deleteAction(name) {
  const act = () => confirmed({
    heading: `Delete task ${name}?`,
    text: "It is listed no more. Its events stay in the log, its checkpoints and its output on storage; a later submission of the name goes on from there.",
    yes: "Delete",
    done: `Task ${name} is deleted.`,
    send: () => remove(pathOf(name)),
  });
  return { text: "Delete", label: `Delete task ${name}`, act };
}

function weightAction(name) {
  return { text: "Weight", label: `Change the weight of task ${name}`, act: () => askWeight(name).catch(sayWhyNot) };
}

function weightText(task) {
  return `It is ${task.weight} now, in proportion to those of the other tasks. The planner plans anew at once.`;
}

/** Ask for another weight of the task as it is now: who has changed it meanwhile is not overruled unseen. */
async function askWeight(name) {
  let { found, tag } = await tagged(pathOf(name));
  confirmed({
    heading: `Change the weight of task ${name}?`,
    text: weightText(found),
    yes: "Change",
    done: `The weight of task ${name} is changed.`,
    field: "weight",
    value: found.weight,
    send: (weight) => patch(pathOf(name), { weight: Number(weight) }, tag),
    refused: async (error) => {
      const asItWas = () => ({ found, tag }); // the next request is refused, too
      if (error.status === CHANGED) ({ found, tag } = await tagged(pathOf(name)).catch(asItWas));
      return weightText(found);
    },
  });
}
