// What the page offers: what whoever has the session may do. The API refuses the rest, whatever is shown.

let actor = { name: "", scope: "read" };

/** Take over who has the session, as the API says. */
export function setActor(found) {
  actor = found;
}

/** Return whether they may change what belongs to all. */
export function mayOperate() {
  return actor.scope === "operate";
}

/** Return whether they may submit tasks, and say something about incidents. */
export function maySubmit() {
  return actor.scope === "submit" || mayOperate();
}

/** Return whether they may change a task: their own, or any. */
export function mayChange(task) {
  return mayOperate() || (maySubmit() && task.owner === actor.name);
}
