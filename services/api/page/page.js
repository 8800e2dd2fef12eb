// The live page: asks the REST API for what has changed, and shows it.
//
// An event of the log says what may have changed; that is asked for again, at most every 500 ms, and every 2 s while
// many events come or answers take long. What heartbeats alone say (steps, losses) is asked for every 2 s. A page that
// nobody sees asks for nothing.

import { afterChanges, showSubmission } from "./actions.js";
import { Problem, follow, get } from "./api.js";
import { showNodes } from "./cluster.js";
import { showCosts } from "./costs.js";
import { byId, setText } from "./dom.js";
import { showIncidents, showPlans } from "./incidents.js";
import { setActor } from "./rights.js";
import { showTasks } from "./tasks.js";
import { count } from "./text.js";
import { showWaf } from "./waf.js";

const PAUSE_MS = 500;
const BUSY_PAUSE_MS = 2000;
const BUSY_EVENTS = 20; // in one pause: more than anybody reads
const BUSY_ROUND_MS = 500;
const LIVE_MS = 2000;
const SLOW_MS = 10_000; // sums over time, which no event changes at once
const WAF_STEP_MS = 5000;
const SHORT_WINDOW_S = 300; // in which two seconds can be seen
const MOST_NODES = 500; // what a map can show
const MOST_TASKS = 100;
const MOST_ENDED = 20;
const MOST_INCIDENTS = 25;
const MOST_PLANS = 20;

const GOING_ON = ["pending", "queued", "running", "transitioning", "degraded", "stopping"];
const ENDED = ["stopped", "succeeded", "failed"];
const known = { tasks: [], nodes: [], incidents: [], waf: null, currency: "" };

async function listed(path, limit, filters = []) {
  const parameters = new URLSearchParams([["limit", limit], ...filters]);
  const { items, next_cursor } = await get(path, parameters);
  return { items, more: next_cursor !== null };
}

function windowS() {
  return Number(byId("waf-window").value);
}

function of(states) {
  return [["order", "newest"], ...states.map((state) => ["state", state])];
}

const parts = {
  async actor() { // before those that offer what the actor may do
    const found = await get("/v1/actor");
    return () => {
      setActor(found);
      showSubmission();
    };
  },
  async nodes() {
    const { items, more } = await listed("/v1/nodes", MOST_NODES);
    return () => {
      known.nodes = items;
      showNodes(items, more);
    };
  },
  async tasks() {
    const [now, before] = await Promise.all([
      listed("/v1/tasks", MOST_TASKS, of(GOING_ON)), listed("/v1/tasks", MOST_ENDED, of(ENDED)),
    ]);
    return () => {
      known.tasks = [...now.items.reverse(), ...before.items];
      showTasks(known.tasks);
    };
  },
  async incidents() {
    const [open, newest] = await Promise.all([
      listed("/v1/incidents", MOST_INCIDENTS, of(["open"])), listed("/v1/incidents", MOST_INCIDENTS, of([])),
    ]);
    return () => {
      const all = new Map([...open.items, ...newest.items].map((incident) => [incident.id, incident]));
      known.incidents = [...all.values()].sort((one, other) => other.detected_at.localeCompare(one.detected_at));
      showIncidents(known.incidents, known.currency);
    };
  },
  async plans() {
    const { items } = await listed("/v1/plans", MOST_PLANS, of([]));
    return () => showPlans(items);
  },
  async costs() {
    const costs = await get("/v1/costs", { limit: 1 });
    return () => {
      showCosts(costs);
      if (known.currency === costs.currency) return;
      known.currency = costs.currency;
      showIncidents(known.incidents, known.currency);
    };
  },
  async waf() {
    // In steps, so that all who look at the same window ask for the same.
    const now = Math.floor(Date.now() / WAF_STEP_MS) * WAF_STEP_MS;
    const from = new Date(now - windowS() * 1000).toISOString();
    known.waf = await get("/v1/waf", { from });
    return () => {};
  },
};

const BY_EVENT = [
  [/^task\.(progressed|checkpointed)/, ["tasks"]],
  [/^task\./, ["tasks", "nodes", "waf"]],
  [/^(node|worker|anomaly)\./, ["nodes", "tasks"]],
  [/^(error|incident)\./, ["incidents", "nodes", "tasks", "waf"]],
  [/^plan\./, ["plans", "tasks", "nodes", "incidents"]],
  [/^state\./, ["plans", "tasks", "nodes", "incidents", "waf"]],
];

const wanted = new Set();
let busy = false;
let ended = false;
let events = 0; // since the last round of requests began
let follows = false; // whether the stream of events is connected

function want(names) {
  names.forEach((name) => wanted.add(name));
  if (!busy) refresh();
}

async function refresh() {
  if (busy || ended || document.hidden || wanted.size === 0) return;
  busy = true;
  const names = [...wanted];
  const began = performance.now();
  wanted.clear();
  events = 0;
  try {
    const shows = await Promise.all(names.map((name) => parts[name]()));
    byId("content").hidden = false;
    shows.forEach((show) => show());
    if (known.waf !== null && (names.includes("waf") || names.includes("incidents"))) showWaf(known.waf, known.incidents);
    summarise();
    if (follows) showConnection("● live");
    performance.clearMarks("shown");
    performance.mark("shown"); // for measurements
  } catch (error) {
    names.forEach((name) => wanted.add(name));
    interrupted(error);
  }
  const overloaded = events > BUSY_EVENTS || performance.now() - began > BUSY_ROUND_MS;
  setTimeout(() => {
    busy = false;
    refresh();
  }, overloaded ? BUSY_PAUSE_MS : PAUSE_MS);
}

function summarise() {
  const going = known.tasks.filter((task) => GOING_ON.includes(task.state)).length;
  const open = known.incidents.filter((incident) => !incident.restored_at).length;
  const incidents = open ? `▲ ${count(open, "open incident")}` : "● no open incident";
  setText(byId("summary"), `${count(going, "task")}, ${incidents}`);
  byId("summary").className = open ? "trouble" : "";
  document.title = open ? `(${open}) Unicron` : "Unicron";
}

function showConnection(text, trouble = false) {
  setText(byId("connection"), text);
  byId("connection").className = trouble ? "trouble" : "";
}

function interrupted(error) {
  if (!(error instanceof Problem)) throw error;
  if (error.status === 401) {
    ended = true;
    byId("no-session").hidden = false;
    byId("content").hidden = true;
    setText(byId("no-session-reason"), `The server says: ${error.message}.`);
    showConnection("not connected", true);
    setText(byId("summary"), "");
  } else {
    showConnection(`▲ not up to date: ${error.message}`, true);
  }
}

afterChanges(() => want(["tasks", "nodes", "plans", "incidents"]));
byId("waf-window").addEventListener("change", () => want(["waf"]));
document.addEventListener("visibilitychange", () => want(Object.keys(parts)));
setInterval(() => want(windowS() <= SHORT_WINDOW_S ? ["tasks", "nodes", "waf"] : ["tasks", "nodes"]), LIVE_MS);
setInterval(() => want(["waf", "costs", "incidents"]), SLOW_MS);
want(Object.keys(parts));
follow((type) => {
  events += 1;
  const found = BY_EVENT.find(([pattern]) => pattern.test(type));
  if (found) want(found[1]);
}, (state) => {
  follows = state === "connected";
  if (follows) want(Object.keys(parts)); // what has happened while there was no stream
  else interrupted(state);
});
