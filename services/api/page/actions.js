// What a user may ask for: submit, stop, drain, return. Everything but a submission is confirmed first.

import { Problem, post, randomKey } from "./api.js";
import { byId } from "./dom.js";

let changed = () => {};
let asked = null;
let key = "";

/** Call `act` after each change that was made. */
export function afterChanges(act) {
  changed = act;
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

/** Ask whether to send a request, and send it. `action`: path, heading, text, yes, done, and whether it has a reason. */
export function confirmed(action) {
  asked = action;
  byId("confirm-heading").textContent = action.heading;
  byId("confirm-text").textContent = action.text;
  byId("confirm-yes").textContent = action.yes;
  byId("confirm-problem").textContent = "";
  byId("reason-field").hidden = !action.reason;
  byId("reason").value = "";
  byId("confirm-dialog").showModal();
}

/** Send a form's request once, with its button disabled meanwhile; show in the form why it was refused. */
async function sent(form, problem, request, done) {
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
  } finally {
    send.disabled = false;
  }
}

byId("confirm-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const action = asked;
  const body = action.reason ? JSON.stringify({ reason: byId("reason").value }) : undefined;
  sent(byId("confirm-form"), byId("confirm-problem"), () => post(action.path, body), () => action.done);
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
