// What the page asks the REST API for, and what it knows from the answers.

import { get, getSums } from "./api.js";
import { incidentsSince } from "./marks.js";

const NOT_FOUND = 404;
const MOST_TASKS = 100;
const MOST_ENDED = 20;
const MOST_INCIDENTS = 25;
const MOST_PLANS = 20;
const MOST_SLOW = 10;
const WAF_STEP_MS = 5000;
const COSTS_S = 5; // asked for every ten seconds, and dear: a moment more or less is not seen in what has added up
const MARKS_MS = 60_000; // for so long the chart may lack incidents of its time

const GOING_ON = ["pending", "queued", "running", "transitioning", "degraded", "stopping"];
const NOTHING = { items: [], more: false };

/** What was answered last. `node`: details of the chosen node; `more`: there is more than was asked for. */
export const known = {
  actor: null, troubles: null, map: null, node: null, going: NOTHING, failed: NOTHING, finished: NOTHING, open: NOTHING, newest: NOTHING,
  plans: NOTHING, slow: NOTHING, costs: null, waf: null, marks: NOTHING,
};

const marks = { at: -Infinity, gap: false };

/**
 * Return whether the incidents of the chart are to be asked for again. Where there are too many to show, a gap between
 * two answers says nothing new.
 */
export function marksAreOld() {
  return (marks.gap && !known.marks.more) || performance.now() - marks.at >= MARKS_MS;
}

async function listed(path, limit, ageS, filters = []) {
  const parameters = new URLSearchParams([["limit", limit], ...filters]);
  const { items, next_cursor } = await get(path, parameters, ageS);
  return { items, more: next_cursor !== null };
}

function of(states) {
  return [["order", "newest"], ...states.map((state) => ["state", state])];
}

/** Tasks in these states without their ranks, of which a large task has thousands. */
function tasksOf(states) {
  return [["ranks", "false"], ...of(states)];
}

async function askEnded(ageS) {
  const [failed, finished] = await Promise.all([
    listed("/v1/tasks", MOST_ENDED, ageS, tasksOf(["failed"])),
    listed("/v1/tasks", MOST_ENDED, ageS, tasksOf(["stopped", "succeeded"])),
  ]);
  Object.assign(known, { failed, finished });
}

let chosenNode = null; // name of the node whose details are shown

/** Return the name of the node whose details are shown, or null. */
export function chosen() {
  return chosenNode;
}

/** Have the details of a node shown, or with null of none; return them once they are known. */
export async function choose(name) {
  chosenNode = name;
  known.node = null;
  await askDetails();
  return known.node;
}

/** Ask for the details of the chosen node; they stay null if the API does not know it. */
async function askDetails() {
  const name = chosenNode;
  if (name === null) return;
  let node = null;
  try {
    node = await get(`/v1/nodes/${encodeURIComponent(name)}`);
  } catch (error) {
    if (error.status !== NOT_FOUND) throw error;
  }
  if (name === chosenNode) known.node = node; // else another one has been chosen meanwhile
}

/** What changes from one moment to the next. `ageS` of each part: how old its answer may be, as of `get`. */
export const liveParts = {
  async actor() {
    known.actor = await get("/v1/actor");
  },
  async troubles(ageS) {
    known.troubles = await get("/v1/troubles", {}, ageS);
  },
  async nodes(ageS) {
    [known.map] = await Promise.all([get("/v1/node-map", {}, ageS), askDetails()]);
  },
  async tasks(ageS) {
    const going = await listed("/v1/tasks", MOST_TASKS, ageS, tasksOf(GOING_ON));
    const names = new Set(going.items.map(({ name }) => name));
    // A task that goes on no more is not gone from the page meanwhile.
    if (known.going.items.some(({ name }) => !names.has(name))) await askEnded(ageS);
    known.going = going;
  },
  ended: askEnded,
  async incidents(ageS) {
    const [open, newest] = await Promise.all([
      listed("/v1/incidents", MOST_INCIDENTS, ageS, of(["open"])), listed("/v1/incidents", MOST_INCIDENTS, ageS, of([])),
    ]);
    const before = new Set(known.newest.items.map(({ id }) => id));
    const allNew = before.size > 0 && newest.more && !newest.items.some(({ id }) => before.has(id));
    marks.gap ||= allNew; // more have come than the list shows
    Object.assign(known, { open, newest });
  },
  async plans(ageS) {
    known.plans = await listed("/v1/plans", MOST_PLANS, ageS, of([]));
  },
  async slow(ageS) {
    known.slow = await listed("/v1/slow-workers", MOST_SLOW, ageS, of([]));
  },
};

/** Return what adds up a history, as `liveParts`. `windowS`: returns how many seconds the chart shows. */
export function sumParts(windowS) {
  // In steps, so that all who look at the same window ask for the same.
  const start = () => Math.floor(Date.now() / WAF_STEP_MS) * WAF_STEP_MS - windowS() * 1000;
  return {
    async waf(ageS) {
      known.waf = await getSums("/v1/waf", { from: new Date(start()).toISOString() }, ageS);
    },
    async marks() {
      known.marks = await incidentsSince(start());
      Object.assign(marks, { at: performance.now(), gap: false });
    },
    async costs() {
      known.costs = await getSums("/v1/costs", { limit: 1, breakdowns: false }, COSTS_S);
    },
  };
}

/** Return the tasks that are known, each once: those that go on, the oldest first, then the ended, the newest first. */
export function tasks() {
  const { going, failed, finished } = known;
  const ended = [...failed.items, ...finished.items];
  const all = [...going.items].reverse().concat(ended);
  return [...new Map(all.reverse().map((task) => [task.name, task])).values()].reverse();
}

/** Return the incidents that are known, each once. */
export function incidents() {
  return [...new Map([...known.open.items, ...known.newest.items].map((one) => [one.id, one])).values()];
}
