// The page of one task: its state, its course, what its ranks print, its faults, plans and submissions.

import { afterChanges } from "./actions.js";
import { get, getSums } from "./api.js";
import { noteProblem, noteShown } from "./connection.js";
import { showCourse, wanted as wantedCourses, whenChosen } from "./course.js";
import { byId, element, keyed, setText, timeElement } from "./dom.js";
import { showIncidents } from "./incidents.js";
import { revealNamed } from "./links.js";
import { showMetrics, wanted as wantedMetrics, whenWanted } from "./metrics.js";
import { showOutput, stopOutput } from "./output.js";
import { taskName } from "./place.js";
import { showPlans } from "./plans.js";
import { setActor } from "./rights.js";
import { Rounds } from "./rounds.js";
import { showContent, showNoSession } from "./session.js";
import { follow } from "./stream.js";
import { showTasks } from "./tasks.js";

const LIVE_MS = 2000;
const SLOW_MS = 10_000;
const MOST_LISTED = 50;
const NOT_FOUND = 404;
const PATH = `/v1/tasks/${encodeURIComponent(taskName)}`;
const NOTHING = { items: [], more: false };
const OF_TASK = /^(task|error|incident|plan|state|worker|anomaly)\./;

const known = { task: null, currency: "", incidents: NOTHING, plans: NOTHING, attempts: NOTHING, courses: [], metrics: [] };
let follows = false;
let first = true;

async function listed(path, parameters) {
  const { items, next_cursor } = await get(path, { limit: MOST_LISTED, ...parameters });
  return { items, more: next_cursor !== null };
}

const rounds = new Rounds({
  async actor() { setActor(await get("/v1/actor")); },
  async task() { known.task = await get(PATH).catch(absent); },
  async incidents() { known.incidents = await listed("/v1/incidents", { task: taskName, order: "newest" }); },
  async currency() { known.currency ||= (await getSums("/v1/costs", { limit: 1, breakdowns: false })).currency; },
  async plans() { known.plans = await listed("/v1/plans", { task: taskName, order: "newest" }); },
  async attempts() { known.attempts = await listed(`${PATH}/attempts`, {}); },
  async course() { known.courses = await Promise.all(wantedCourses().map((attempt) => getSums(`${PATH}/progress`, attempt === null ? {} : { attempt }))); },
  async metrics() {
    const of = (attempt) => attempt === null ? [] : [["attempt", attempt]];
    known.metrics = await Promise.all(wantedCourses().map((attempt) => get(`${PATH}/metrics`, [...wantedMetrics(), ...of(attempt)])));
  },
}, (names, at, problem) => {
  if (problem?.status === 401) return endSession();
  if (names.length) {
    showContent(); // first: a chart in what is hidden has no width
    show(at);
  }
  noteProblem("task", problem?.message ?? null);
});

function absent(problem) {
  if (problem.status === NOT_FOUND) return null;
  throw problem;
}

function show(at) {
  const { task, incidents, plans, attempts, courses } = known;
  setText(byId("tasks-heading"), `Task ${taskName}`);
  document.title = `${taskName}${task === null ? "" : `: ${task.state}`} – Unicron`;
  showTasks(task === null ? [] : [task], incidents.items, { going: NOTHING, failed: NOTHING, finished: NOTHING });
  if (task === null) {
    setText(byId("no-tasks"), `There is no task ${taskName}.`);
    return;
  }
  showCourse(task, courses, attempts.items, incidents.items);
  showMetrics(known.metrics);
  showRanks(task.ranks);
  showOutput(task, PATH);
  showIncidents(incidents.items, { open: NOTHING, newest: incidents }, known.currency);
  showPlans(plans);
  showAttempts(attempts.items);
  setText(byId("specification-text"), JSON.stringify(task.spec, null, 2));
  noteShown(at);
  if (first) revealNamed();
  first = false;
  performance.clearMarks("shown");
  performance.mark("shown");
}

/** Show what the cells of a row have. */
function fill(row, cells) {
  row.replaceChildren(...cells.map((cell) => element("td", {}, cell)));
}

/** Show where the ranks are. */
function showRanks(ranks) {
  keyed(byId("rank-rows"), ranks, {
    key: ({ rank }) => String(rank),
    make: () => element("tr"),
    update: (made, { rank, worker, pid, state, slowdown }) => {
      const slow = slowdown > 1 ? `, ${slowdown.toFixed(2)} times slower` : "";
      fill(made, [rank, worker, pid ?? "–", `${state}${slow}`]);
    },
  });
  byId("no-ranks").hidden = ranks.length > 0;
}

/** Show the submissions of the name, the newest first. */
function showAttempts(attempts) {
  keyed(byId("attempt-rows"), [...attempts].reverse(), {
    key: ({ number }) => String(number),
    make: () => element("tr"),
    update: (made, one) => fill(made, [
      one.number, one.state, timeElement(one.submitted_at), `${one.first_step} to ${one.last_step}`, one.checkpoint || "–", one.owner, one.reason || "–",
    ]),
  });
}

function endSession() {
  rounds.stop();
  stopOutput();
  showNoSession();
  if (follows) stream.cut(); // it is tried again now and then, and succeeds once there is another session
}

const stream = follow((type) => {
  rounds.count();
  if (OF_TASK.test(type)) rounds.want(/^task\.(progressed|checkpointed)/.test(type) ? ["task"] : ["task", "incidents", "plans", "attempts"]);
}, (state) => {
  follows = state === "connected";
  if (follows) {
    rounds.resume();
    rounds.wantAll(); // what has happened while there was no stream
  } else if (state.status === 401) endSession();
  noteProblem("stream", follows || state.status === 401 ? null : state.message);
});

afterChanges(() => rounds.wantAll());
whenChosen(() => rounds.want(["course"]));
whenWanted(() => rounds.want(["metrics"]));
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return stopOutput();
  stream.again();
  rounds.wantAll();
});
rounds.wantAll();
setInterval(() => rounds.want(["task"]), LIVE_MS);
setInterval(() => rounds.want(["course", "metrics", "incidents"]), SLOW_MS);
