// What the script of a task logs, over its steps: one metric or two, beside another submission.

import { axisStyle, Chart, colourOf } from "./chart.js";
import { steps as incidentSteps, whenChosen } from "./course.js";
import { byId, element, keyed, setText } from "./dom.js";
import { count } from "./text.js";

const HEIGHT_PX = 240;
const SELECTS = ["metric-first", "metric-second"];
let asked = "";
let act = () => {};

/** Numbers of an axis: those of a learning rate are small. */
function numbers(_, values) {
  return values.map((value) => String(Number(value.toPrecision(6))));
}

const chart = new Chart("metrics-chart", HEIGHT_PX, () => ({
  scales: { x: { time: false } },
  axes: [axisStyle(), { ...axisStyle(), size: 70, values: numbers },
    { ...axisStyle(), scale: "second", side: 1, size: 60, grid: { show: false }, values: numbers }],
  series: [
    {},
    { stroke: colourOf("--waf"), width: 2, spanGaps: true, points: { show: false } },
    { stroke: colourOf("--healthy"), width: 2, dash: [6, 4], scale: "second", spanGaps: true, points: { show: false } },
    { stroke: colourOf("--quiet"), width: 2, spanGaps: true, points: { show: false } },
  ],
}), incidentSteps);

/** Call `found` when other metrics, or those of other submissions, are to be asked for. */
export function whenWanted(found) {
  act = found;
  whenChosen(found);
}

/** Return the metrics that are shown, as parameters of a request. */
export function wanted() {
  const names = SELECTS.map((id) => byId(id).value).filter((name) => name !== "");
  return [...new Set(names)].map((name) => ["metric", name]);
}

SELECTS.forEach((id) => byId(id).addEventListener("change", () => act()));

/** Show metrics of one submission, and of the one that it is compared with. */
export function showMetrics(answers) {
  const names = [...new Set(answers.flatMap((answer) => answer.names))].sort();
  byId("metrics").hidden = names.length === 0;
  if (!names.length) return;
  choices("metric-first", names);
  choices("metric-second", ["", ...names]);
  const now = JSON.stringify(wanted());
  if (now !== asked) act();
  asked = now;
  const [first, second] = SELECTS.map((id) => byId(id).value);
  const [shown, other] = answers;
  const columns = [of(shown, first), of(shown, second), ...(other ? [of(other, first)] : [])];
  chart.show(uPlot.join([...columns, ...(other ? [] : [[[], []]])]));
  setText(byId("metrics-text"), [...[first, second].filter((name) => name !== "").map((name) => newest(shown, name)), ...leftOut(shown)].join("; "));
}

/** Return steps and values of a metric; none where the answer does not have it. */
function of(answer, name) {
  const found = answer.series.find((one) => one.name === name);
  return found ? [found.steps, found.values] : [[], []];
}

function newest(answer, name) {
  const [steps, values] = of(answer, name);
  if (!steps.length) return `${name}: no value`;
  return `${name} ${values.at(-1)?.toPrecision(4) ?? "is not finite"} at step ${steps.at(-1).toLocaleString("en")}`;
}

/** Say what is not shown. */
function leftOut(answer) {
  const every = Math.max(1, ...answer.series.map((one) => one.every));
  return [
    ...(every > 1 ? [`of ${every} steps one is kept`] : []),
    ...(answer.left_out ? [`${count(answer.left_out, "value")} of further names left out`] : []),
    ...(answer.silent.length ? [`▲ ${answer.silent.join(", ")}: no answer, newer values may be missing`] : []),
  ];
}

function choices(id, names) {
  keyed(byId(id), names, { key: (name) => name, make: (name) => element("option", { value: name }), update: (option, name) => { option.textContent = name || "none"; } });
}
