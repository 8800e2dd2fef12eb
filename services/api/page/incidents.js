// The table of incidents.

import { confirmed } from "./actions.js";
import { post } from "./api.js";
import { byId, element, keyed, setText, showActions, tableRow, timeElement } from "./dom.js";
import { anchor, idButton, reference } from "./links.js";
import { maySubmit } from "./rights.js";
import { duration, moreText, money, secondsBetween, thanUsual } from "./text.js";

const MOST_PLANS = 3; // of an incident, the newest: its page has all

const CELLS = [
  ["state"], ["when (UTC)"], ["what", "text"], ["where", "text"], ["tasks", "text"], ["answer"],
  ["after the fault", "line"], ["cost", "n"], ["post-mortem", "line"], ["action", "actions"],
];

/** Show incidents: those that are open first, then the newest first. `known`: whether lists have more. */
export function showIncidents(incidents, { open, newest }, currency) {
  const shown = [...incidents].sort((one, other) =>
    isOpen(other) - isOpen(one) || other.detected_at.localeCompare(one.detected_at));
  keyed(byId("incident-rows"), shown, {
    key: (incident) => incident.id,
    make: makeIncident,
    update: (row, incident) => fillIncident(row, incident, currency),
    shown: (incident) => [incident, currency, maySubmit()],
  });
  byId("no-incidents").hidden = shown.length > 0;
  setText(byId("more-incidents"), moreText(open.more || newest.more, shown.length, "incident", "unicron incidents"));
}

/** Return whether there is still something to do about an incident. */
export function isOpen(incident) {
  return incident.closed_at === null;
}

function makeIncident(incident) {
  const row = tableRow(CELLS);
  row.id = anchor("incident", incident.id);
  row.tabIndex = -1;
  row.children[2].dataset.heading = "";
  const address = `/v1/incidents/${encodeURIComponent(incident.id)}/postmortem?format=html`;
  row.children[8].append(element("a", { href: address, "aria-label": `post-mortem of ${incident.id}` }, "post-mortem"));
  row.children[2].append(element("div"), idButton(incident.id), element("div", { class: "quiet" }));
  return row;
}

function fillIncident(row, incident, currency) {
  const [state, when, what, where, tasks, answer, times, cost, , action] = row.children;
  const place = incident.worker ?? incident.node ?? "–";
  state.textContent = stateOf(incident);
  when.replaceChildren(timeElement(incident.occurred_at));
  const attempts = new Set(incident.attempts.map(({ generation }) => generation)).size; // ranks of one fail alike
  setText(what.firstChild, `${incident.severity}: ${incident.kind}${attempts > 1 ? `, ${attempts} times in a row` : ""}`);
  setText(what.lastChild, incident.notes.length ? lastNote(incident.notes) : "");
  where.textContent = incident.rank === null ? place : `${place} (rank ${incident.rank})`;
  tasks.textContent = incident.tasks.join(", ") || "–";
  const plans = incident.plans.slice(-MOST_PLANS);
  const earlier = incident.plans.length - plans.length;
  answer.replaceChildren(incident.response ?? "none yet",
    ...(earlier ? [element("div", {}, `${earlier} earlier`)] : []),
    ...plans.map((plan) => element("div", {}, "plan ", reference("plan", plan))));
  times.replaceChildren(...timesOf(incident).map((text) => element("div", {}, text)));
  cost.textContent = money(incident.cost.failure_money, currency);
  row.className = isOpen(incident) ? "open" : "";
  const actions = incident.acknowledged ? [noteAction] : [acknowledgeAction, noteAction];
  showActions(action, maySubmit() ? actions.map((make) => make([incident.id])) : []);
}

/** Return what happened how long after the fault. */
function timesOf({ occurred_at, detected_at, resumed_at, restored_at }) {
  const after = [["detected", detected_at], ["training again", resumed_at], ["planned strength", restored_at]];
  return after.filter(([, at]) => at !== null).map(([what, at]) => `${what} ${duration(secondsBetween(occurred_at, at))}`);
}

function lastNote(notes) {
  const { by, text } = notes.at(-1);
  return `${notes.length > 1 ? `last of ${notes.length} notes, by` : "note by"} ${by}: ${text}`;
}

function pathOf(id, request) {
  return `/v1/incidents/${encodeURIComponent(id)}/${request}`;
}

function named(ids) {
  return `incident ${ids[0]}${ids.length > 1 ? ` and ${ids.length - 1} more` : ""}`;
}

/** Return the action by which somebody says that they take care of incidents, which have one cause. */
export function acknowledgeAction(ids) {
  const act = () => confirmed({
    heading: `Acknowledge ${named(ids)}?`,
    text: "Everybody who looks at it sees that you take care of it.",
    yes: "Acknowledge",
    done: ids.length > 1 ? `${ids.length} incidents are acknowledged.` : `Incident ${ids[0]} is acknowledged.`,
    send: () => Promise.all(ids.map((id) => post(pathOf(id, "acknowledge")))),
  });
  return { text: "Acknowledge", label: `Acknowledge ${named(ids)}`, ids, act };
}

/** Return the action that adds a note to an incident: to the first of those that have one cause. */
export function noteAction([id]) {
  const act = () => confirmed({
    heading: `Add a note to incident ${id}?`,
    text: "Everybody who looks at it sees the note, and who has written it. It stays in the log.",
    yes: "Add",
    done: `The note was added to incident ${id}.`,
    field: "note",
    send: (text) => post(pathOf(id, "notes"), JSON.stringify({ text })),
  });
  return { text: "Note", label: `Add a note to incident ${id}`, act };
}

function stateOf(incident) {
  const { closed_at, restored_at, stuck_s, usual_s, failed_tasks } = incident;
  const healed = restored_at !== null || Object.keys(failed_tasks).length > 0;
  const parts = [closed_at === null ? "▲\u00a0open" : healed ? "●\u00a0closed" : "▲\u00a0closed, not healed"];
  if (stuck_s !== null) parts.push(`stuck, ${duration(stuck_s)} longer than ${thanUsual(usual_s)}`);
  for (const task of Object.keys(incident.failed_tasks)) parts.push(`▲\u00a0${task} failed`);
  if (incident.acknowledged) parts.push(`acknowledged by ${incident.acknowledged.by}`);
  return parts.join(", ");
}
