// The chart: WAF over time against the healthy line, with incidents marked.

import { byId, setText } from "./dom.js";
import { axisTimes, clock, count, percent, shortId, si } from "./text.js";

const HEIGHT_PX = 224;
const NEAR_PX = 5; // of the pointer
const MOST_NAMED = 5;
let chart = null;
let marks = [];

function colourOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Return a round number of the axis; its digits behind the point are zeros mostly. */
function axisText(value) {
  return si(value, "FLOP/s").replace(/\.0+(?= )/, "");
}

function drawMarks(plot) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = colourOf("--bad");
  ctx.lineWidth = 2 * devicePixelRatio;
  ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const { at_s } of marks) {
    const x = plot.valToPos(at_s, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

function made(data, width) {
  const axis = { stroke: colourOf("--quiet"), grid: { stroke: colourOf("--line"), width: 1 }, ticks: { stroke: colourOf("--line") } };
  const options = {
    width,
    height: HEIGHT_PX,
    tzDate: (at_s) => uPlot.tzDate(new Date(at_s * 1000), "Etc/UTC"), // where ticks are
    legend: { show: false },
    cursor: { show: false },
    scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
    axes: [{ ...axis, space: 90, values: (_, values) => axisTimes(values) }, { ...axis, size: 100, values: (_, values) => values.map((value) => axisText(value)) }],
    series: [
      {},
      { stroke: colourOf("--waf"), width: 2, fill: `${colourOf("--waf")}22`, points: { show: false } },
      { stroke: colourOf("--healthy"), width: 2, dash: [6, 4], points: { show: false } },
    ],
    hooks: { draw: [drawMarks] },
  };
  return new uPlot(options, data, byId("waf-chart"));
}

/** Show WAF over time. `found`: the incidents of the window, and whether there are more. */
export function showWaf(history, found) {
  const start_s = Date.parse(history.window_start) / 1000;
  const end_s = Date.parse(history.window_end) / 1000;
  const times = history.waf_flop_per_s.map((_, index) => start_s + (index + 0.5) * history.point_s);
  const data = [times, history.waf_flop_per_s, history.healthy_flop_per_s];
  marks = found.items.map((incident) => ({ at_s: Date.parse(incident.occurred_at) / 1000, incident }))
    .filter(({ at_s }) => at_s >= start_s && at_s <= end_s);
  if (chart === null) chart = made(data, byId("waf-chart").clientWidth);
  else chart.setData(data);
  const now = history.waf_flop_per_s.at(-1) ?? 0;
  const healthy = history.healthy_flop_per_s.at(-1) ?? 0;
  const share = healthy > 0 ? ` (${percent(now / healthy)})` : "";
  const above = share && now > healthy ? ", as steps are faster than the plans took them to be" : "";
  setText(byId("waf-text"), `At the end ${si(now, "FLOP/s")} of ${si(healthy, "FLOP/s")}${share}${above}; ${found.more ? "more than " : ""}${count(marks.length, "incident")} in this time.`);
}

/** Name the incidents whose marks are under the pointer. */
function nameMarks(event) {
  const x = event.clientX - chart.over.getBoundingClientRect().left;
  const near = marks.filter(({ at_s }) => Math.abs(chart.valToPos(at_s, "x") - x) < NEAR_PX).slice(0, MOST_NAMED);
  byId("waf-chart").title = near.map(({ incident }) => nameOf(incident)).join("\n");
}

function nameOf({ id, severity, kind, worker, node, occurred_at }) {
  return `${severity}: ${kind} on ${worker ?? node ?? "the cluster"}, ${clock(occurred_at)} UTC (incident ${shortId(id)})`;
}

byId("waf-chart").addEventListener("mousemove", (event) => { if (chart !== null) nameMarks(event); });

new ResizeObserver(([entry]) => {
  const width = Math.round(entry.contentRect.width);
  if (chart !== null && width > 0 && width !== chart.width) chart.setSize({ width, height: HEIGHT_PX });
}).observe(byId("waf-chart"));

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  if (chart === null) return;
  const { data, width } = chart;
  chart.destroy();
  chart = made(data, width);
});
