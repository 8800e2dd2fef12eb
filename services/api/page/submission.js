// The submission of a task.

import { openDialog, sent } from "./actions.js";
import { post, randomKey } from "./api.js";
import { byId } from "./dom.js";
import { maySubmit } from "./rights.js";

const EXAMPLE = `name: my-task
model: {layers: 2, hidden: 64, heads: 4, sequence_length: 64}
batch: {global: 8, micro: 1}
steps: 1000
data: /data/corpus.txt  # on every node
workers: {min: 1, max: 4}
`;

let key = "";

/** Offer to submit a task, to whoever may. */
export function showSubmission() {
  byId("submit").hidden = !maySubmit();
}

// A changed text is another submission: a repeated key would return the task of the first one.
function changeText(text) {
  byId("specification").value = text;
  key = randomKey();
}

byId("submit").addEventListener("click", () => {
  key = randomKey();
  byId("submit-problem").textContent = "";
  openDialog(byId("submit-dialog"));
});

byId("specification").addEventListener("input", () => { key = randomKey(); });

byId("submit-example").addEventListener("click", () => {
  changeText(EXAMPLE);
  byId("specification").focus();
});

byId("submit-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const request = () => post("/v1/tasks", byId("specification").value,
    { type: "application/yaml", headers: { "Idempotency-Key": key } });
  sent(byId("submit-form"), byId("submit-problem"), request, (task) => `Task ${task.name} was submitted.`);
});

byId("submit-cancel").addEventListener("click", () => byId("submit-dialog").close());
