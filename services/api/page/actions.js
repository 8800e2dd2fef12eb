// What a user asks for: confirmed first, in a dialog that may have one field; and what became of it.

import { Problem } from "./api.js";
import { byId, focusNear } from "./dom.js";

const FIELDS = ["reason", "weight", "note"];
const SAID_MS = 20_000; // for two sentences, whoever reads them

let changed = () => {};
let asked = null;
let forgetting = 0; // timer of what is said

/** Call `act` after each change that was made. */
export function afterChanges(act) {
  changed = act;
}

/** Show what became of a request, beside whatever is looked at, for a while. */
export function say(text, { failed = false } = {}) {
  const message = byId("message");
  clearTimeout(forgetting);
  message.textContent = text;
  message.className = failed ? "failed" : "";
  if (text) forgetting = setTimeout(() => say(""), SAID_MS);
}

function words(error) {
  if (!(error instanceof Problem)) throw error;
  return error.status === 403 ? `Not allowed: ${error.message}` : error.message;
}

/** Say why what a user wants cannot be begun. */
export function sayWhyNot(error) {
  say(words(error), { failed: true });
}

/**
 * Ask whether to send a request, and send it. `action`: heading, text, yes, done; `field`: the one that the dialog has,
 * "reason", "weight" or "note", and `value`, what is in it first; `send`, called with what is in it then. `refused`, if
 * any, is called with an error, and returns the text from then on.
 */
export function confirmed(action) {
  asked = action;
  byId("confirm-heading").textContent = action.heading;
  byId("confirm-text").textContent = action.text;
  byId("confirm-yes").textContent = action.yes;
  byId("confirm-problem").textContent = "";
  for (const name of FIELDS) {
    const field = byId(name);
    byId(`${name}-field`).hidden = name !== action.field;
    field.disabled = name !== action.field; // else a browser waits for one that nobody sees to be filled in
    field.value = action.value ?? "";
  }
  openDialog(byId("confirm-dialog"));
}

/** Open a dialog. Once it is closed the focus is where it was; where that is gone, in its row. */
export function openDialog(dialog) {
  const opener = document.activeElement;
  const place = opener.parentElement;
  say("");
  dialog.showModal();
  dialog.addEventListener("close", () => {
    if (opener.isConnected) opener.focus();
    else focusNear(place);
  }, { once: true });
}

/** Send a form's request once, with its button disabled meanwhile; show in the form why it was refused. */
export async function sent(form, problem, request, done, refused = () => {}) {
  const send = form.querySelector("button[type=submit]");
  send.disabled = true;
  problem.textContent = "";
  try {
    const answer = await request();
    form.closest("dialog").close();
    say(done(answer));
    changed();
  } catch (error) {
    problem.textContent = words(error);
    await refused(error);
  } finally {
    send.disabled = false;
  }
}

byId("confirm-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const action = asked;
  const request = () => action.send(action.field ? byId(action.field).value : undefined);
  const refused = async (error) => { byId("confirm-text").textContent = await action.refused?.(error) ?? action.text; };
  sent(byId("confirm-form"), byId("confirm-problem"), request, () => action.done, refused);
});

byId("confirm-no").addEventListener("click", () => byId("confirm-dialog").close());
