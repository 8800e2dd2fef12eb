// The list of plans with their explanations.

import { get } from "./api.js";
import { byId, element, keyed, setText, timeElement } from "./dom.js";
import { anchor, reference } from "./links.js";
import { moreText } from "./text.js";

/** Show plans, the newest first; the words of one are asked for when it is opened. */
export function showPlans({ items, more }) {
  keyed(byId("plan-list"), items, { key: (plan) => plan.id, make: makePlan, update: fillPlan });
  byId("no-plans").hidden = items.length > 0;
  setText(byId("more-plans"), moreText(more, items.length, "plan", "unicron plan list"));
}

function makePlan(plan) {
  const words = element("p", { class: "words", "aria-live": "polite" });
  const incident = plan.incident === null ? null : element("p", { class: "words" }, "answers incident ", reference("incident", plan.incident));
  const made = element("details", { id: anchor("plan", plan.id) }, element("summary"), incident, words);
  made.addEventListener("toggle", () => {
    if (made.open && !words.textContent) explain(plan.id, words);
  });
  return made;
}

async function explain(id, words) {
  words.textContent = "…";
  try {
    words.textContent = (await get(`/v1/plans/${encodeURIComponent(id)}`)).words;
  } catch (error) {
    words.textContent = `The explanation is not at hand: ${error.message}`;
  }
}

function fillPlan(details, plan) {
  const waiting = Object.keys(plan.queued);
  const parts = [`${plan.response} (${plan.trigger})`, plan.state];
  if (plan.tasks.length) parts.push(plan.tasks.join(", "));
  if (waiting.length) parts.push(`waiting: ${waiting.join(", ")}`);
  details.firstChild.replaceChildren(element("b", {}, plan.id), " · ", timeElement(plan.decided_at), ` · ${parts.join(" · ")}`);
}
