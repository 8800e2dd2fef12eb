// What the page says of its connection: whether what it shows is up to date, and of when it is.

import { byId, setText } from "./dom.js";
import { count, timeOfDay } from "./text.js";

const LATE_MS = 8000; // steps and losses are asked for every two seconds
const OLD_S = 5; // from when on the age is said, too
const TICK_MS = 1000;
const SILENCE = "the server does not answer";

const problems = new Map(); // source -> text
let asOf = null; // when what is shown was asked for
let awake = Date.now(); // since when somebody sees the page: a hidden one asks for nothing
let ended = false;
let works = true; // the control plane: what is shown is up to date all the same while a part of it is away
let wasLate = false;
let onChange = () => {};

/** Call `act` when the connection becomes good or bad. */
export function whenConnectionChanges(act) {
  onChange = act;
}

/** Take note of a problem of a source; null: it has none. */
export function noteProblem(source, text) {
  if (text === null) problems.delete(source);
  else problems.set(source, text);
  showConnection();
}

/** Say whether all parts of the control plane work: nothing is live where nothing is healed. */
export function noteWorking(all) {
  works = all;
  showConnection();
}

/** Take note that lists asked for at this time are shown. */
export function noteShown(at) {
  asOf = at;
  showConnection();
}

/** Return whether what the page shows may be out of date. */
export function isLate() {
  return ended || problems.size > 0 || silent();
}

function silent() {
  return Date.now() - Math.max(asOf ?? 0, awake) > LATE_MS;
}

/** Say whether there is a session. */
export function noteSession(there) {
  if (there && ended) awake = Date.now();
  ended = !there;
  showConnection();
}

function words() {
  if (ended) return "▲ not connected";
  if (problems.size > 0) return `▲ not up to date: ${[...problems.values()][0]}`;
  if (silent()) return `▲ not up to date: ${SILENCE}`;
  return asOf === null ? "connecting" : works ? "● live" : "△ up to date";
}

function showConnection() {
  const late = isLate();
  setText(byId("connection"), words());
  byId("connection").classList.toggle("trouble", late);
  setText(byId("as-of"), asOf === null || ended ? "" : `as of ${timeOfDay(asOf)} UTC${age()}`);
  if (late === wasLate) return;
  wasLate = late;
  onChange();
}

function age() {
  const age_s = Math.round((Date.now() - asOf) / 1000);
  return age_s > OLD_S ? `, ${count(age_s, "second")} ago` : "";
}

document.addEventListener("visibilitychange", () => { awake = Date.now(); });
setInterval(showConnection, TICK_MS);
