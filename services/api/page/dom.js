// Elements from data. Data become text nodes and attributes, never markup.

import { clock, localTime } from "./text.js";

/** Return the element of the page with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Return a new element. `children`: elements, or texts; null is left out. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null).map((child) => child instanceof Node ? child : String(child)));
  return made;
}

/** Return a button that calls `act`. */
export function button(text, label, act) {
  const made = element("button", { type: "button", "aria-label": label }, text);
  made.addEventListener("click", act);
  return made;
}

/** Set the text of an element, if it is another one: an unchanged live region is not announced again. */
export function setText(found, text) {
  if (found.textContent !== text) found.textContent = text;
}

const known = new WeakMap();

/**
 * Show a list inside of `parent`. An item's element stays the same as long as its key is there, so that the keyboard's
 * focus and opened details outlive an update; `update` is called where the item's `shown` value has changed.
 */
export function keyed(parent, items, { key, make, update = () => {}, shown = (item) => item }) {
  const first = focusIn(parent);
  const before = known.get(parent) ?? new Map();
  const after = new Map();
  for (const item of items) {
    const id = key(item);
    const signature = JSON.stringify(shown(item));
    const entry = before.get(id) ?? { node: make(item), signature: null };
    if (entry.signature !== signature) update(entry.node, item);
    after.set(id, { node: entry.node, signature });
  }
  const focused = focusIn(parent) ?? first; // an update may have moved it
  for (const [id, entry] of before) if (!after.has(id)) entry.node.remove();
  let next = parent.firstChild;
  for (const { node } of after.values()) {
    if (node === next) next = next.nextSibling;
    else parent.insertBefore(node, next);
  }
  known.set(parent, after);
  if (focused && (document.activeElement ?? document.body) === document.body) keepFocus(focused, parent);
}

function focusIn(parent) {
  return parent.contains(document.activeElement) ? document.activeElement : null;
}

/** Focus an element whose row has moved; where it is gone, what is nearest to where it was. */
function keepFocus(focused, parent) {
  if (focused.isConnected) focused.focus({ preventScroll: true });
  else focusNear(parent);
}

/** Focus the first control of a place, else the heading of its row, else that of its section. */
export function focusNear(place) {
  const row = place.closest("tr, li, article");
  const near = (row && place.querySelector("button")) ?? row?.querySelector("th, h3, [data-heading]") ?? place.closest("section")?.querySelector("h2");
  if (!near) return;
  if (near.tabIndex < 0) near.tabIndex = -1; // a heading takes the focus from here alone
  near.focus({ preventScroll: true });
}

/** Return the row of a table. `cells`: label and class of each; the first is the row's heading if `heading` is said. */
export function tableRow(cells, { heading = false } = {}) {
  const made = cells.map(([label, kind], index) => heading && index === 0
    ? element("th", { scope: "row", role: "rowheader" })
    : element("td", { role: "cell", class: kind ?? null, "data-label": label }));
  return element("tr", { role: "row" }, made);
}

/** Return an element with a time of the API, in UTC; where this browser is, it is what the title says. */
export function timeElement(at) {
  const [day, time] = clock(at).split(" ").map((part) => element("span", { class: "line" }, part));
  return element("time", { datetime: at, title: localTime(at) }, day, " ", time);
}

/** Show the buttons of actions. `actions`: text, label and act of each; those that stay keep the keyboard's focus. */
export function showActions(parent, actions) {
  keyed(parent, actions, {
    key: ({ label, ids = [] }) => [label, ...ids].join(" "),
    make: ({ text, label, act }) => button(text, label, act),
    shown: () => null,
  });
}
