// Which letter and colour a task has on the map and in the table: by the order in which it was first seen.

import { element } from "./dom.js";

const COLOURS = 8; // classes task-0 to task-7 of page.css
const places = new Map();

function place(task) {
  if (!places.has(task)) places.set(task, places.size);
  return places.get(task);
}

/** Return the class of a task's colour. */
export function colour(task) {
  return `task-${place(task) % COLOURS}`;
}

/** Return the letter of a task: A to Z, then A1, B1 and so on. */
export function letter(task) {
  const index = place(task);
  const round = Math.floor(index / 26);
  return String.fromCharCode(65 + (index % 26)) + (round || "");
}

/** Return the mark of a task beside its name. */
export function badge(task) {
  return element("span", { class: `badge ${colour(task)}`, "aria-hidden": "true" }, letter(task));
}
