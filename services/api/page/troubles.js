// What needs somebody, in one line at the top and in the document's title.

import { isLate } from "./connection.js";
import { byId, element, keyed, setText } from "./dom.js";
import { awayParts } from "./parts.js";
import { count } from "./text.js";

const AWAY = ["lost", "unreachable", "isolated"];
const NAME = "Unicron";
const SIGN_LENGTH = 2; // of the sign and its space before a trouble

let newest = [];

/** Show what needs somebody. `known`: what was answered last. */
export function showTroubles(known) {
  newest = troublesOf(known);
  setText(byId("going"), `${known.going.more ? "more than " : ""}${count(known.going.items.length, "task")}`);
  const none = { section: "", text: "● no trouble", grave: false };
  keyed(byId("troubles"), newest.length ? newest : [none], {
    key: ({ section, kind }) => `${section} ${kind}`,
    make: ({ section }) => element("li", {}, section ? element("a", { href: `#${section}` }) : element("span")),
    update: (item, { text, grave }) => {
      item.firstChild.textContent = text;
      item.className = grave ? "trouble" : "";
    },
  });
  byId("summary").className = newest.some(({ grave }) => grave) ? "trouble" : "";
  showTitle();
}

/** Show the troubles in the document's title: it is seen while another window is in front. */
export function showTitle() {
  const [first, ...others] = isLate() ? ["▲ not up to date"] : newest.map(({ text }) => text);
  const all = [first, ...others.map((text) => text.slice(SIGN_LENGTH))].join(", ");
  document.title = first === undefined ? NAME : `${all} - ${NAME}`;
}

/** Return the troubles, the gravest first: text with a sign, kind, section of the page, and whether it is grave. */
function troublesOf({ status, failed, nodes, open, going }) {
  const away = AWAY.map((state) => [state, "node", nodes.items.filter((node) => node.state === state).length]);
  const inState = (state) => going.items.filter((task) => task.state === state).length;
  const slow = nodes.items.flatMap(({ workers }) => workers).filter(({ slowdown }) => slowdown > 1).length;
  const stuck = open.items.filter(({ stuck_s }) => stuck_s !== null).length;
  return [
    ...awayParts(status).map(({ name }) => ({ section: "", kind: name, text: `▲ ${name} does not work`, grave: true })),
    trouble("incidents", "stuck", "incident", stuck, { grave: true }),
    trouble("tasks", "failed", "task", failed.items.length, { more: failed.more, grave: true }),
    ...away.map(([state, noun, number]) => trouble("cluster", state, noun, number, { grave: true })),
    trouble("incidents", "open", "open incident", open.items.length, { more: open.more, grave: true, adjective: "" }),
    trouble("tasks", "degraded", "task", inState("degraded"), { more: going.more }),
    trouble("tasks", "queued", "task", inState("queued"), { more: going.more }),
    trouble("cluster", "slow", "slow worker", slow, { more: nodes.more, adjective: "" }),
  ].filter((one) => one !== null);
}

function trouble(section, kind, noun, number, { more = false, grave = false, adjective = ` ${kind}` } = {}) {
  if (number === 0) return null;
  const text = `${grave ? "▲" : "△"} ${more ? "at least " : ""}${count(number, noun)}${adjective}`;
  return { section, kind, text, grave };
}
