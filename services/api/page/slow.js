// The list of slow workers. A task with one trains on, so it is no incident.

import { byId, element, keyed, setText, timeElement } from "./dom.js";
import { moreText } from "./text.js";

/** Show slow workers: those that are slow now first, then the newest first. `known`: whether lists have more. */
export function showSlow({ slow }) {
  const shown = [...slow.items].sort((one, other) => isSlow(other) - isSlow(one) || other.found_at.localeCompare(one.found_at));
  keyed(byId("slow-list"), shown, { key: ({ id }) => id, make: makeLine, update: fillLine });
  byId("slow").hidden = shown.length === 0;
  setText(byId("more-slow"), moreText(slow.more, shown.length, "slow worker", "unicron slow-workers"));
}

function isSlow({ ended_at }) {
  return ended_at === null;
}

function makeLine({ id, worker }) {
  const href = `/v1/slow-workers/${encodeURIComponent(id)}/postmortem?format=html`;
  const link = element("a", { href, "aria-label": `post-mortem of the slow worker ${worker}` }, "post-mortem");
  return element("li", {}, element("span"), " ", link);
}

function fillLine(line, { worker, task, slowdown, worst, found_at, ended }) {
  const now = ended === null ? `△ ${worker} of ${task} is ${slowdown.toFixed(2)}` : `● ${worker} of ${task} was ${worst.toFixed(2)}`;
  line.firstChild.replaceChildren(`${now} times as slow as its peers, found `, timeElement(found_at), ended === null ? "." : `; ${ended}.`);
}
