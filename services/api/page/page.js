// The live page: asks the REST API for what has changed, and shows it.
//
// An event of the log says what may have changed; that is asked for again, at most every 500 ms, and every 3 s while
// many events come or answers take long. What heartbeats alone say (steps, losses) is asked for every 2 s. Sums over a
// history are asked for apart from the rest, which does not wait for them. A page that nobody sees asks for nothing.

import { afterChanges } from "./actions.js";
import { nodesOf, showNodes } from "./cluster.js";
import { noteProblem, noteShown, noteWorking, whenConnectionChanges } from "./connection.js";
import { showCosts } from "./costs.js";
import { byId } from "./dom.js";
import { showIncidents } from "./incidents.js";
import { revealNamed } from "./links.js";
import { incidents, known, liveParts, marksAreOld, sumParts, tasks } from "./lists.js";
import { showParts } from "./parts.js";
import { showPlans } from "./plans.js";
import { setActor } from "./rights.js";
import { Rounds } from "./rounds.js";
import { showContent, showNoSession } from "./session.js";
import { showSlow } from "./slow.js";
import { follow } from "./stream.js";
import { showSubmission } from "./submission.js";
import { showTasks } from "./tasks.js";
import { showTitle, showTroubles } from "./troubles.js";
import { showWaf } from "./waf.js";

const LIVE_MS = 2000;
const SLOW_MS = 10_000; // sums over time, which no event changes at once
const SHORT_WINDOW_S = 300; // in which two seconds can be seen
const WAIT_MS = 4000; // for the stream, before which nothing is asked for: else everything would be asked for twice

const BY_EVENT = [
  [/^task\.(progressed|checkpointed)/, ["tasks"]],
  [/^task\./, ["troubles", "tasks", "ended", "nodes", "waf"]],
  [/^worker\./, ["troubles", "slow", "nodes", "tasks"]],
  [/^(node|anomaly)\./, ["troubles", "nodes", "tasks"]],
  [/^trouble\./, ["troubles"]],
  [/^(error|incident)\./, ["troubles", "incidents", "nodes", "tasks", "waf"]],
  [/^plan\./, ["troubles", "plans", "tasks", "nodes", "incidents"]],
  [/^state\./, ["troubles", "plans", "tasks", "nodes", "incidents", "waf"]],
];

let begun = false;
let follows = false; // whether the stream of events is connected
const came = new Set(); // names of the parts that were answered: of others nothing is said

function windowS() {
  return Number(byId("waf-window").value);
}

const live = new Rounds(liveParts, (names, at, problem) => {
  shown("live", names, problem, () => {
    if (names.includes("actor")) setActor(known.actor);
    const first = came.size === 0;
    names.forEach((name) => came.add(name));
    showLists();
    if (first) revealNamed();
    if (names.includes("incidents")) showChart();
    if (names.includes("nodes") && names.includes("tasks")) noteShown(at);
  });
});

const sums = new Rounds(sumParts(windowS), (names, _, problem) => {
  shown("sums", names, problem, () => {
    if (names.includes("costs")) showCosts(known.costs);
    showChart();
    showLists(); // the currency is that of the costs
  });
});

/** Show what a round has brought, and say what it has not. */
function shown(source, names, problem, show) {
  if (problem?.status === 401) return endSession();
  if (names.length) {
    showContent(); // first: a chart in what is hidden has no width
    show();
  }
  noteProblem(source, problem?.message ?? null);
  if (problem || live.asking || sums.asking) return;
  performance.clearMarks("shown");
  performance.mark("shown"); // for measurements
}

function showLists() {
  const currency = known.costs?.currency ?? "";
  const have = (...names) => names.every((name) => came.has(name));
  showSubmission();
  if (have("troubles")) {
    showTroubles(known.troubles, known.waf);
    showParts(known.troubles.status);
    noteWorking(known.troubles.status.ready);
  }
  if (have("tasks", "ended")) showTasks(tasks(), incidents(), known);
  if (have("nodes")) showMap();
  if (have("incidents")) showIncidents(incidents(), known, currency);
  if (have("slow")) showSlow(known);
  if (have("plans")) showPlans(known.plans);
}

/** Show the nodes, and the details of the chosen one. */
function showMap() {
  showNodes({ nodes: nodesOf(known.map), slow: known.map.slow, node: known.node });
}

/** Show the chart; the newest incidents are known before those of its whole time are asked for again. */
function showChart() {
  const marked = new Map([...known.marks.items, ...incidents()].map((one) => [one.id, one]));
  if (known.waf !== null) showWaf(known.waf, { items: [...marked.values()], more: known.marks.more });
}

function endSession() {
  live.stop();
  sums.stop();
  showNoSession();
  if (follows) stream.cut(); // it is tried again now and then, and succeeds once there is another session
}

function want(names) {
  live.want(names);
  sums.want(names);
}

function wantAll() {
  begun = true;
  live.wantAll();
  sums.wantAll();
}

function streamState(state) {
  follows = state === "connected";
  if (follows) {
    live.resume();
    sums.resume();
    wantAll(); // what has happened while there was no stream
  } else if (state.status === 401) endSession();
  else if (!begun) wantAll();
  noteProblem("stream", follows || state.status === 401 ? null : state.message);
}

const stream = follow((type) => {
  live.count();
  sums.count();
  const found = BY_EVENT.find(([pattern]) => pattern.test(type));
  if (found) want(found[1]);
}, streamState);

afterChanges(() => want(["troubles", "tasks", "ended", "nodes", "plans", "incidents"]));
whenConnectionChanges(() => showTitle());
byId("waf-window").addEventListener("change", () => want(["waf", "marks"]));
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  stream.again();
  wantAll();
});
setTimeout(() => begun || wantAll(), WAIT_MS);
setInterval(() => {
  if (!begun) return;
  if (!follows) live.wantAll();
  want(windowS() <= SHORT_WINDOW_S ? ["troubles", "tasks", "nodes", "waf"] : ["troubles", "tasks", "nodes"]);
}, LIVE_MS);
setInterval(() => want(["waf", ...(marksAreOld() ? ["marks"] : []), "costs", "incidents", "slow", "ended"]), SLOW_MS);
