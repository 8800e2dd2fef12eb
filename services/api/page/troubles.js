// What is wrong now, a row for each cause: what, since when, what to do, what it costs, and who is on it.

import { confirmed } from "./actions.js";
import { post } from "./api.js";
import { isLate } from "./connection.js";
import { byId, element, keyed, setText, showActions } from "./dom.js";
import { acknowledgeAction, noteAction } from "./incidents.js";
import { reference } from "./links.js";
import { mayChange, maySubmit } from "./rights.js";
import { resumeAction } from "./tasks.js";
import { clock, count, duration, secondsBetween, thanUsual, timeOfDay } from "./text.js";

const NAME = "Unicron";
const TITLE_LENGTH = 60; // of a cause in the document's title
const DAY_S = 86_400;

let shown = [];

/** Show what is wrong. `troubles`: the answer of the API; `waf`: the newest history, or null. */
export function showTroubles({ items, more, money_per_hour, currency, as_of }, waf) {
  shown = items;
  const number = items.length + more;
  setText(byId("trouble-count"), number ? `${signOf(items[0])} ${count(number, "cause")} of trouble` : "● no trouble");
  setText(byId("trouble-names"), number ? `: ${items.map(({ what }) => what).join("; ")}` : "");
  byId("summary").classList.toggle("trouble", items.some(({ grave }) => grave));
  setText(byId("losing"), losing(number, money_per_hour, currency, waf));
  keyed(byId("trouble-list"), items, {
    key: ({ key }) => key,
    make: makeRow,
    update: (row, trouble) => fillRow(row, trouble, currency, as_of),
    shown: (trouble) => [trouble, timeText(trouble, as_of), currency, maySubmit(), trouble.owners.map((owner) => mayChange({ owner }))],
  });
  setText(byId("more-troubles"), more ? `${count(more, "further cause")} not shown; GET /v1/troubles says which.` : "");
  showTitle();
}

/** Show the gravest trouble in the document's title: it is seen while another window is in front. */
export function showTitle() {
  const [first] = shown;
  const others = shown.length > 1 ? ` and ${shown.length - 1} more` : "";
  const text = isLate() ? "▲ not up to date" : first ? `${signOf(first)} ${first.what.slice(0, TITLE_LENGTH)}${others}` : "";
  document.title = text ? `${text} - ${NAME}` : NAME;
}

function signOf({ grave }) {
  return grave ? "▲" : "△";
}

/** Return what all causes cost together, beside what the cluster achieves. */
function losing(number, perHour, currency, waf) {
  const healthy = waf?.healthy_flop_per_s.at(-1) ?? 0;
  const share = healthy > 0 ? `WAF ${Math.round(100 * waf.waf_flop_per_s.at(-1) / healthy)} % of healthy` : "";
  const cost = number ? `losing ${rate(perHour, currency)}` : "";
  return [cost, share].filter((part) => part).join(", ");
}

/** Return what is lost in an hour; large amounts without their fractions. */
function rate(perHour, currency) {
  return `${perHour >= 100 ? Math.round(perHour).toLocaleString("en") : perHour.toFixed(2)} ${currency}/h`;
}

function makeRow() {
  return element("li", {},
    element("div", { class: "cause" }, element("h3", { "data-heading": "" }), element("p", { class: "since" })),
    element("p", { class: "todo" }),
    element("p", { class: "cost" }, element("b"), " ", element("span", { class: "quiet" })),
    element("div", { class: "who" }, element("p"), element("p", { class: "links" }), element("p", { class: "row-actions" })));
}

function fillRow(row, trouble, currency, asOf) {
  const [cause, todo, cost, who] = row.children;
  row.className = trouble.grave ? "grave" : "";
  setText(cause.firstChild, `${signOf(trouble)} ${trouble.what}`);
  setText(cause.lastChild, timeText(trouble, asOf));
  todo.replaceChildren(...withCommands(trouble.todo.join(" ")));
  setText(cost.firstChild, trouble.money_per_hour === null ? "cost" : rate(trouble.money_per_hour, currency));
  setText(cost.lastChild, trouble.cost_basis);
  const [by, links, actions] = who.children;
  setText(by, whoText(trouble));
  showLinks(links, trouble);
  showActions(actions, actionsOf(trouble));
}

/** Return a text with what is in back quotes as code. */
function withCommands(text) {
  return text.split("`").map((part, index) => index % 2 ? element("code", {}, part) : part);
}

/** Return since when it is, against how long it usually takes. */
function timeText({ state, since, usual_s, late_s }, asOf) {
  if (since === null) return state;
  const age_s = secondsBetween(since, asOf);
  const from = `since ${age_s < DAY_S ? timeOfDay(since) : clock(since)}`;
  if (late_s !== null) return `${state}, ${duration(late_s)} longer than ${thanUsual(usual_s)}, ${from}`;
  return `${state} for ${duration(age_s)}${usual_s === null ? "" : ` (usually ${duration(usual_s)})`}, ${from}`;
}

function whoText({ by, acknowledged, note, owners }) {
  if (acknowledged) return `${by} is on it${note ? `: ${note}` : ""}`;
  if (by) return `nobody acknowledged it; note by ${by}: ${note}`;
  return `nobody is on it${owners.length ? `; owner ${owners.join(", ")}` : ""}`;
}

/** Show the way to the first incident, or slow worker: others of the cause are like it. */
function showLinks(parent, { incidents, slow_workers }) {
  const all = [...incidents.map((id) => ["incidents", id]), ...slow_workers.map((id) => ["slow-workers", id])];
  keyed(parent, all.slice(0, 1), { key: (one) => one.join("/"), make: makeLinks });
}

function makeLinks([list, id]) {
  const href = `/v1/${list}/${encodeURIComponent(id)}/postmortem?format=html`;
  const page = element("a", { href, "aria-label": `post-mortem of ${id}, a cause of trouble` }, "post-mortem");
  return element("span", {}, page, " ", list === "incidents" ? reference("incident", id) : null);
}

function actionsOf(trouble) {
  const found = [];
  if (maySubmit() && !trouble.acknowledged) found.push(trouble.incidents.length ? acknowledgeAction(trouble.incidents) : takeAction(trouble));
  if (maySubmit() && trouble.incidents.length) found.push(noteAction(trouble.incidents));
  const one = trouble.tasks.length === 1 && ["task-failed", "task-waits"].includes(trouble.kind);
  if (one && mayChange({ owner: trouble.owners[0] })) found.push(resumeAction(trouble.tasks[0]));
  return found;
}

/** Return the action by which somebody says that they take care of a cause that is no incident. */
function takeAction({ key, what }) {
  const act = () => confirmed({
    heading: "Acknowledge this cause?",
    text: `Everybody who looks at it sees that you take care of it, until it is no more: ${what}`,
    yes: "Acknowledge",
    done: "The cause is acknowledged.",
    send: () => post(`/v1/troubles/${encodeURIComponent(key)}/acknowledge`),
  });
  return { text: "Acknowledge", label: `Acknowledge cause ${key}`, act }; // what it says may change while it has the focus
}
