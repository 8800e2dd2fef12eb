// What a user asks for. Everything but a submission is confirmed first, in a dialog that may have one field.

import { Problem, post, randomKey } from "./api.js";
import { byId } from "./dom.js";
import { maySubmit } from "./rights.js";

const FIELDS = ["reason", "weight", "note"];

let changed = () => {};
let asked = null;
let key = "";

/** Call `act` after each change that was made. */
export function afterChanges(act) {
  changed = act;
}

/** Offer what does not belong to a task, a node or an incident. */
export function showSubmission() {
  byId("submit").hidden = !maySubmit();
}

/** Show what became of a request. */
export function say(text, { failed = false } = {}) {
  const message = byId("message");
  message.textContent = text;
  message.className = failed ? "failed" : "";
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
  byId("confirm-dialog").showModal();
}

/** Send a form's request once, with its button disabled meanwhile; show in the form why it was refused. */
async function sent(form, problem, request, done, refused = () => {}) {
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

byId("submit").addEventListener("click", () => {
  key = randomKey();
  byId("submit-problem").textContent = "";
  byId("submit-dialog").showModal();
});

// A changed text is another submission: a repeated key would return the task of the first one.
byId("specification").addEventListener("input", () => { key = randomKey(); });

byId("submit-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const request = () => post("/v1/tasks", byId("specification").value,
    { type: "application/yaml", headers: { "Idempotency-Key": key } });
  sent(byId("submit-form"), byId("submit-problem"), request, (task) => `Task ${task.name} was submitted.`);
});

for (const [id, dialog] of [["submit-cancel", "submit-dialog"], ["confirm-no", "confirm-dialog"]]) {
  byId(id).addEventListener("click", () => byId(dialog).close());
}
