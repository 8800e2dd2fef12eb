// Whether this browser has a session, and what to do without one.

import { noteSession } from "./connection.js";
import { byId, setText } from "./dom.js";

let had = false;

/** Show the page's content: the server lets this browser in. */
export function showContent() {
  had = true;
  byId("no-session").hidden = true;
  byId("content").hidden = false;
  noteSession(true);
}

/** Show how to get a session in place of what may no longer be seen. */
export function showNoSession() {
  const heading = had ? "The session of this browser has ended" : "This browser has no session, or it has ended";
  setText(byId("no-session-heading"), heading);
  byId("no-session").hidden = false;
  byId("content").hidden = true;
  noteSession(false);
}
