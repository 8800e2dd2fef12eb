// How the parts of the control plane are, and how far they are behind the log.

import { byId, setText } from "./dom.js";
import { count } from "./text.js";

/** Show how the parts are; what to do about those that are away is a trouble. */
export function showParts({ ready, checks }) {
  const away = checks.filter(({ ok }) => !ok).map(({ name }) => name);
  const behind = checks.filter(({ lag }) => lag).map(({ name, lag }) => `${name} ${count(lag, "event")} behind`);
  const state = ready ? "● control plane works" : `▲ control plane: ${away.join(", ")} away`;
  setText(byId("parts"), [state, ...behind].join(", "));
  byId("parts").classList.toggle("trouble", !ready);
}
