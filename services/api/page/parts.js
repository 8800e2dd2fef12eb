// How the parts of the control plane are: while one is away, nothing is healed, and the page shows what was.

import { byId, setText } from "./dom.js";
import { count } from "./text.js";

/** Return the parts that do not work. */
export function awayParts(status) {
  return status.checks.filter(({ ok }) => !ok);
}

/** Show how the parts are, and how far they are behind the log. */
export function showParts(status) {
  const away = awayParts(status);
  const behind = status.checks.filter(({ lag }) => lag).map(({ name, lag }) => `${name} ${count(lag, "event")} behind`);
  const state = away.length
    ? `▲ control plane: ${away.map(({ name, detail }) => `${name} does not work (${detail})`).join(", ")}`
    : "● control plane works";
  setText(byId("parts"), [state, ...behind].join(", "));
  byId("parts").classList.toggle("trouble", away.length > 0);
}
