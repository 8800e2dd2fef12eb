// The table of tasks.

import { confirmed, sayWhyNot } from "./actions.js";
import { patch, post, tagged } from "./api.js";
import { badge, letter } from "./colours.js";
import { byId, element, keyed, showActions } from "./dom.js";
import { mayChange } from "./rights.js";
import { clock, duration, si } from "./text.js";

const ENDED = new Set(["stopped", "succeeded", "failed"]);
const CHANGED = 412; // since it was read

/** Show tasks, those that go on first. */
export function showTasks(tasks) {
  for (const task of tasks) if (!ENDED.has(task.state)) letter(task.name); // colours by the order of the table
  keyed(byId("task-rows"), tasks, { key: (task) => task.name, make: makeRow, update: fillRow, shown });
  byId("no-tasks").hidden = tasks.length > 0;
}

function shown(task) {
  return [cells(task).map(String), troubles(task), task.state, mayChange(task)];
}

function cells(task) {
  const step = `${task.step.toLocaleString()} / ${task.steps.toLocaleString()}`;
  const left = ENDED.has(task.state) || !task.step_s ? null : (task.steps - task.step) * task.step_s;
  return [
    step,
    task.loss === null ? "–" : task.loss.toPrecision(4),
    task.workers,
    task.throughput_flop_per_s ? si(task.throughput_flop_per_s, "FLOP/s") : "–",
    ENDED.has(task.state) ? (task.ended_at ? `ended ${clock(task.ended_at)}` : "–") : duration(left),
    task.weight,
  ];
}

function troubles(task) {
  const found = [];
  if (task.reason) found.push(task.reason);
  if (task.stop_refused) found.push(`not stopped: ${task.stop_refused.reason}`);
  if (task.checkpoint_failure) found.push(`checkpoint of step ${task.checkpoint_failure.step}: ${task.checkpoint_failure.reason}`);
  for (const anomaly of task.anomalies) {
    found.push(`${anomaly.kind}: ${si(anomaly.value, anomaly.unit)}, expected ${si(anomaly.expected, anomaly.unit)}`);
  }
  for (const [worker, slowdown] of Object.entries(task.slow_workers)) {
    found.push(`${worker} is ${slowdown.toFixed(2)} times slower`);
  }
  return found;
}

function makeRow(task) {
  const name = element("th", { scope: "row" }, badge(task.name), task.name);
  const numbers = [0, 1, 2, 3, 4, 5].map(() => element("td", { class: "n" }));
  return element("tr", {}, name, element("td", { class: "text" }), ...numbers, element("td"));
}

function fillRow(row, task) {
  const [, state, ...rest] = row.children;
  const action = rest.pop();
  state.replaceChildren(task.state, ...troubles(task).map((text) => element("div", { class: "quiet" }, text)));
  cells(task).forEach((text, index) => { rest[index].textContent = String(text); });
  const goesOn = !ENDED.has(task.state) && task.state !== "stopping";
  showActions(action, goesOn && mayChange(task) ? [weightAction(task.name), stopAction(task.name)] : []);
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
