// The chart of a task: loss and throughput over its steps, with its incidents marked, beside another submission.

import { axisStyle, axisText, Chart, colourOf } from "./chart.js";
import { byId, element, keyed, setText } from "./dom.js";
import { count, si } from "./text.js";

const HEIGHT_PX = 240;
let marks = [];
const acts = [];

const chart = new Chart("course-chart", HEIGHT_PX, () => ({
  scales: { x: { time: false }, rate: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
  axes: [axisStyle(), { ...axisStyle(), size: 70 },
    { ...axisStyle(), scale: "rate", side: 1, size: 60, grid: { show: false }, values: (_, values) => values.map((value) => axisText(value)) }],
  series: [
    {},
    { stroke: colourOf("--waf"), width: 2, spanGaps: true, points: { show: false } },
    { stroke: colourOf("--healthy"), width: 2, dash: [6, 4], scale: "rate", spanGaps: true, points: { show: false } },
    { stroke: colourOf("--quiet"), width: 2, spanGaps: true, points: { show: false } },
  ],
}), steps);

/** Return the steps at which incidents are marked. */
export function steps() {
  return marks;
}

/** Call `act` when somebody chooses which submissions are shown. */
export function whenChosen(act) {
  acts.push(act);
}

/** Return the numbers of the submissions whose courses are to be asked for; null: the present one. */
export function wanted() {
  return ["course-attempt", "course-other"].map((id) => byId(id).value).filter((value, index) => index === 0 || value !== "")
    .map((value) => value === "" ? null : Number(value));
}

["course-attempt", "course-other"].forEach((id) => byId(id).addEventListener("change", () => acts.forEach((act) => act())));

/** Return the points whose steps rise: of steps that were done again, what was said last. */
function rising(points) {
  const found = [];
  for (const point of [...points].reverse()) if (!found.length || point.step < found.at(-1).step) found.push(point);
  return found.reverse();
}

/** Return samples per second; steps where only the script knows its batch. */
function rate({ step_s }, batch) {
  return step_s > 0 ? batch / step_s : null;
}

function columns(course, batch) {
  const points = rising(course.points);
  return [points.map(({ step }) => step), points.map(({ loss }) => loss), points.map((point) => rate(point, batch))];
}

/** Return the step at which an incident struck; null: none of the course was done by then. */
function stepOf(incident, points) {
  if (incident.step !== null) return incident.step;
  return points.find(({ at }) => at >= incident.occurred_at)?.step ?? null;
}

/** Show the courses that were asked for: of one submission, and of the one that it is compared with. */
export function showCourse(task, courses, attempts, incidents) {
  choices("course-attempt", attempts, "present");
  choices("course-other", attempts, "none");
  if (!courses.length) return;
  const batch = task.spec.batch?.global ?? 1;
  const [shown, other] = courses.map((course) => columns(course, batch));
  const data = other ? uPlot.join([shown, [other[0], other[1]]]) : [...shown, shown[0].map(() => null)];
  const { points } = courses[0];
  const [begin, end] = [points[0]?.at ?? "", points.at(-1)?.at ?? ""];
  const here = incidents.filter(({ occurred_at }) => occurred_at >= begin && (courses[0].attempt === task.attempt || occurred_at <= end));
  marks = here.map((incident) => stepOf(incident, points)).filter((step) => step !== null);
  const unit = task.spec.batch ? "samples/s" : "steps/s";
  chart.show(data);
  setText(byId("course-unit"), unit);
  const last = points.at(-1);
  const loss = last === undefined || last.loss === null ? "" : `, loss ${last.loss.toPrecision(4)}`;
  const now = last === undefined ? "No step was reported yet" : `At step ${last.step.toLocaleString("en")}${loss}, ${si(rate(last, batch), unit)}`;
  setText(byId("course-text"), `${now}; ${count(here.length, "incident")} in this time.`);
}

function choices(id, attempts, none) {
  const options = [{ number: "", text: none }, ...attempts.map(({ number, state }) => ({ number, text: `${number}, ${state}` }))];
  keyed(byId(id), options, { key: ({ number }) => String(number), make: ({ number }) => element("option", { value: number }), update: (option, { text }) => { option.textContent = text; } });
}
