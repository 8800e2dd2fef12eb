// The chart: WAF over time against the healthy line, with incidents marked.

import { axisStyle, axisText, Chart, colourOf } from "./chart.js";
import { byId, setText } from "./dom.js";
import { axisTimes, clock, count, percent, shortId, si } from "./text.js";

const HEIGHT_PX = 224;
const NEAR_PX = 5; // of the pointer
const MOST_NAMED = 5;
let marks = [];

const chart = new Chart("waf-chart", HEIGHT_PX, () => ({
  tzDate: (at_s) => uPlot.tzDate(new Date(at_s * 1000), "Etc/UTC"), // where ticks are
  scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
  axes: [
    { ...axisStyle(), space: 90, values: (_, values) => axisTimes(values) },
    { ...axisStyle(), size: 100, values: (_, values) => values.map((value) => axisText(value, "FLOP/s")) },
  ],
  series: [
    {},
    { stroke: colourOf("--waf"), width: 2, fill: `${colourOf("--waf")}22`, points: { show: false } },
    { stroke: colourOf("--healthy"), width: 2, dash: [6, 4], points: { show: false } },
  ],
}), () => marks.map(({ at_s }) => at_s));

/** Show WAF over time. `found`: the incidents of the window, and whether there are more. */
export function showWaf(history, found) {
  const start_s = Date.parse(history.window_start) / 1000;
  const end_s = Date.parse(history.window_end) / 1000;
  const times = history.waf_flop_per_s.map((_, index) => start_s + (index + 0.5) * history.point_s);
  const data = [times, history.waf_flop_per_s, history.healthy_flop_per_s];
  marks = found.items.map((incident) => ({ at_s: Date.parse(incident.occurred_at) / 1000, incident }))
    .filter(({ at_s }) => at_s >= start_s && at_s <= end_s);
  chart.show(data);
  const now = history.waf_flop_per_s.at(-1) ?? 0;
  const healthy = history.healthy_flop_per_s.at(-1) ?? 0;
  const share = healthy > 0 ? ` (${percent(now / healthy)})` : "";
  const above = share && now > healthy ? ", as steps are faster than the plans took them to be" : "";
  setText(byId("waf-text"), `At the end ${si(now, "FLOP/s")} of ${si(healthy, "FLOP/s")}${share}${above}; ${found.more ? "more than " : ""}${count(marks.length, "incident")} in this time.`);
}

/** Name the incidents whose marks are under the pointer. */
function nameMarks(event) {
  const x = event.clientX - chart.plot.over.getBoundingClientRect().left;
  const near = marks.filter(({ at_s }) => Math.abs(chart.plot.valToPos(at_s, "x") - x) < NEAR_PX).slice(0, MOST_NAMED);
  byId("waf-chart").title = near.map(({ incident }) => nameOf(incident)).join("\n");
}

function nameOf({ id, severity, kind, worker, node, occurred_at }) {
  return `${severity}: ${kind} on ${worker ?? node ?? "the cluster"}, ${clock(occurred_at)} UTC (incident ${shortId(id)})`;
}

byId("waf-chart").addEventListener("mousemove", (event) => { if (chart.plot !== null) nameMarks(event); });
