// The table of incidents, and the list of plans with their explanations.

import { confirmed } from "./actions.js";
import { get, post } from "./api.js";
import { byId, element, keyed, showActions } from "./dom.js";
import { maySubmit } from "./rights.js";
import { clock, duration, money, secondsBetween } from "./text.js";

/** Show incidents, the newest first. */
export function showIncidents(incidents, currency) {
  keyed(byId("incident-rows"), incidents, {
    key: (incident) => incident.id,
    make: makeIncident,
    update: (row, incident) => fillIncident(row, incident, currency),
    shown: (incident) => [incident, currency, maySubmit()],
  });
  byId("no-incidents").hidden = incidents.length > 0;
}

function makeIncident(incident) {
  const link = element("a", {
    href: `/v1/incidents/${encodeURIComponent(incident.id)}/postmortem?format=html`,
    "aria-label": `post-mortem of ${incident.id}`,
  }, "post-mortem");
  const kinds = ["line", "text", "line", "text", "n", "line", "n"];
  return element("tr", {}, ...kinds.map((kind) => element("td", { class: kind || null })), element("td", { class: "line" }, link), element("td"));
}

function fillIncident(row, incident, currency) {
  const place = incident.worker ?? incident.node ?? "–";
  const texts = [
    clock(incident.occurred_at),
    `${incident.severity}: ${incident.kind}`,
    incident.rank === null ? place : `${place} (rank ${incident.rank})`,
    incident.tasks.join(", ") || "–",
    duration(secondsBetween(incident.occurred_at, incident.resumed_at ?? incident.restored_at)),
    stateOf(incident),
    money(incident.cost.failure_money, currency),
  ];
  texts.forEach((text, index) => { row.children[index].textContent = text; });
  if (incident.notes.length) row.children[1].append(element("div", { class: "quiet" }, lastNote(incident.notes)));
  row.className = incident.restored_at ? "" : "open";
  const actions = incident.acknowledged ? [noteAction] : [acknowledgeAction, noteAction];
  showActions(row.lastChild, maySubmit() ? actions.map((make) => make(incident.id)) : []);
}

function lastNote(notes) {
  const { by, text } = notes.at(-1);
  return `${notes.length > 1 ? `last of ${notes.length} notes, by` : "note by"} ${by}: ${text}`;
}

function pathOf(id, request) {
  return `/v1/incidents/${encodeURIComponent(id)}/${request}`;
}

function acknowledgeAction(id) {
  const act = () => confirmed({
    heading: `Acknowledge incident ${id}?`,
    text: "Everybody who looks at it sees that you take care of it.",
    yes: "Acknowledge",
    done: `Incident ${id} is acknowledged.`,
    send: () => post(pathOf(id, "acknowledge")),
  });
  return { text: "Acknowledge", label: `Acknowledge incident ${id}`, act };
}

function noteAction(id) {
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
  const parts = [incident.restored_at ? "● closed" : "▲ open"];
  if (incident.acknowledged) parts.push(`acknowledged by ${incident.acknowledged.by}`);
  return parts.join(", ");
}

/** Show plans, the newest first; the words of one are asked for when it is opened. */
export function showPlans(plans) {
  keyed(byId("plan-list"), plans, { key: (plan) => plan.id, make: makePlan, update: fillPlan });
  byId("no-plans").hidden = plans.length > 0;
}

function makePlan(plan) {
  const words = element("p", { class: "words", "aria-live": "polite" });
  const made = element("details", {}, element("summary"), words);
  made.addEventListener("toggle", async () => {
    if (!made.open || words.textContent) return;
    words.textContent = "…";
    try {
      words.textContent = (await get(`/v1/plans/${encodeURIComponent(plan.id)}`)).words;
    } catch (error) {
      words.textContent = `The explanation is not at hand: ${error.message}`;
    }
  });
  return made;
}

function fillPlan(details, plan) {
  const waiting = Object.keys(plan.queued);
  const parts = [clock(plan.decided_at), `${plan.response} (${plan.trigger})`, plan.state];
  if (plan.tasks.length) parts.push(plan.tasks.join(", "));
  if (waiting.length) parts.push(`waiting: ${waiting.join(", ")}`);
  details.firstChild.textContent = parts.join(" · ");
}
