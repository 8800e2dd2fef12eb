// Which page this is: that of the cluster, or below /tasks/ that of one task. Both have the same document.

const TASK = "/tasks/";

/** The task of this page's address; null: it is the page of the cluster. */
export const taskName = location.pathname.startsWith(TASK) ? decodeURIComponent(location.pathname.slice(TASK.length)) : null;

/** Return the address of a task's page. */
export function taskAddress(name) {
  return TASK + encodeURIComponent(name);
}
