// Elements from data. Data become text nodes and attributes, never markup.

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
export function keyed(parent, items, { key, make, update, shown = (item) => item }) {
  const before = known.get(parent) ?? new Map();
  const after = new Map();
  for (const item of items) {
    const id = key(item);
    const signature = JSON.stringify(shown(item));
    const entry = before.get(id) ?? { node: make(item), signature: null };
    if (entry.signature !== signature) update(entry.node, item);
    after.set(id, { node: entry.node, signature });
  }
  for (const [id, entry] of before) if (!after.has(id)) entry.node.remove();
  let next = parent.firstChild;
  for (const { node } of after.values()) {
    if (node === next) next = next.nextSibling;
    else parent.insertBefore(node, next);
  }
  known.set(parent, after);
}

/** Show the buttons of actions. `actions`: text, label and act of each; those that stay keep the keyboard's focus. */
export function showActions(parent, actions) {
  keyed(parent, actions, {
    key: ({ text }) => text,
    make: ({ text, label, act }) => button(text, label, act),
    update: () => {},
    shown: () => null,
  });
}
