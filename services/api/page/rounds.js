// Rounds of requests: what is wanted is asked for together, and again after a pause at the earliest.
//
// Parts that fail leave the others as they are: what has come is shown. After a failure the pauses grow, and a server
// that has not answered is asked for one part until it answers.
//
// While many events come the pauses are longer, not quite the same for all who look, and answers that others have got a
// moment ago will do. What was asked for so is asked for once more, so that the last event is not missed.

import { Problem } from "./api.js";
import { pauseMs } from "./stream.js";

const PAUSE_MS = 500;
const BUSY_PAUSE_MS = 3000;
const REST = 2; // times as long as the answers took: a server that is busy has the time for what comes
const BUSY_EVENTS = 20; // in the time of a long pause: more than anybody reads, and than one fault has
const BUSY_ROUND_MS = 500;
const BUSY_AGE_S = 1; // of answers meanwhile

/** A group of parts. `parts`: name -> function that asks for it, called with how many seconds old the answer may be;
 * `onRound`: called with the names that have come, when they were asked for, and the Problem of those that have not, or
 * null. */
export class Rounds {
  #parts;
  #onRound;
  #wanted = new Set();
  #times = []; // of the newest events, one more than are few
  #busy = false;
  #failures = 0;
  #silent = false; // whether the server gave no answer at all
  #stopped = false;
  #timer = null; // of the pause

  constructor(parts, onRound) {
    this.#parts = parts;
    this.#onRound = onRound;
    this.asking = false;
  }

  /** Count an event: while many come the pauses are longer. */
  count() {
    this.#times.push(performance.now());
    if (this.#times.length > BUSY_EVENTS + 1) this.#times.shift();
  }

  #manyCame() {
    return this.#times.length > BUSY_EVENTS && performance.now() - this.#times[0] < BUSY_PAUSE_MS;
  }

  /** Ask for parts in the next round. */
  want(names) {
    names.filter((name) => name in this.#parts).forEach((name) => this.#wanted.add(name));
    this.#begin();
  }

  wantAll() {
    this.want(Object.keys(this.#parts));
  }

  /** Ask no more, until `resume`. */
  stop() {
    this.#stopped = true;
  }

  /** Go on without a pause: the server answers. */
  resume() {
    this.#stopped = this.#silent = false;
    this.#failures = 0;
    clearTimeout(this.#timer);
    this.#timer = null;
    this.#begin();
  }

  async #begin() {
    if (this.asking || this.#timer !== null || this.#stopped || document.hidden || this.#wanted.size === 0) return;
    this.asking = true;
    const began_ms = performance.now();
    const ageS = this.#busy ? BUSY_AGE_S : 0;
    const began_at = Date.now() - 1000 * ageS;
    const names = this.#next();
    const results = await Promise.allSettled(names.map((name) => this.#parts[name](ageS)));
    const problem = this.#note(names, results);
    if (ageS > 0) names.forEach((name) => this.#wanted.add(name));
    this.asking = false;
    const took_ms = performance.now() - began_ms;
    this.#busy = this.#manyCame() || took_ms > BUSY_ROUND_MS;
    const busy_ms = Math.max(BUSY_PAUSE_MS, REST * took_ms) * (0.75 + Math.random() / 2);
    this.#pause(problem ? pauseMs(this.#failures) : this.#busy ? busy_ms : PAUSE_MS);
    if (this.#stopped) return; // what has come meanwhile may be seen no more
    this.#onRound(names.filter((_, index) => results[index].status === "fulfilled"), began_at, problem);
  }

  #next() {
    const names = this.#silent ? [...this.#wanted].slice(0, 1) : [...this.#wanted];
    names.forEach((name) => this.#wanted.delete(name));
    return names;
  }

  /** Take note of what has failed; return one of the problems, or null. */
  #note(names, results) {
    const failed = names.filter((_, index) => results[index].status === "rejected");
    failed.forEach((name) => this.#wanted.add(name));
    const problems = results.filter(({ status }) => status === "rejected").map(({ reason }) => reason);
    const wrong = problems.find((problem) => !(problem instanceof Problem));
    if (wrong) console.error(wrong); // a mistake of this page
    this.#failures = failed.length ? this.#failures + 1 : 0;
    this.#silent = problems.some(({ status }) => status === 0);
    return problems.find(({ status }) => status === 401) ?? problems[0] ?? null;
  }

  #pause(length_ms) {
    this.#timer = setTimeout(() => {
      this.#timer = null;
      this.#begin();
    }, length_ms);
  }
}
