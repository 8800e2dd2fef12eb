// What a row is called, and the links from one row to another.

import { say } from "./actions.js";
import { button, element } from "./dom.js";
import { shortId } from "./text.js";

const ELSEWHERE = {
  incident: (id) => `Incident ${id} is not among those on this page: the command unicron incidents ${id} shows it.`,
  plan: (id) => `Plan ${id} is not among those on this page: the command unicron plan show ${id} explains it.`,
};

/** Return the id of the element that shows something. `kind`: "incident" or "plan". */
export function anchor(kind, id) {
  return `${kind}-${id}`;
}

/** Show the element with this id; return whether there is one. */
function reveal(name) {
  const found = document.getElementById(name);
  if (found === null) return false;
  if (found instanceof HTMLDetailsElement) found.open = true;
  const target = found instanceof HTMLDetailsElement ? found.firstChild : found;
  target.scrollIntoView({ block: "center" });
  target.focus({ preventScroll: true });
  return true;
}

/** Show what the page's address names, such as `#incident-…`, if it is there. */
export function revealNamed() {
  const name = location.hash.slice(1);
  if (/^(incident|plan)-/.test(name)) reveal(name);
}

/** Return a link to an incident or a plan on this page. */
export function reference(kind, id) {
  const made = element("a", { href: `#${encodeURIComponent(anchor(kind, id))}`, title: `${kind} ${id}` }, shortId(id));
  made.addEventListener("click", (event) => {
    event.preventDefault();
    if (reveal(anchor(kind, id))) history.replaceState(null, "", made.href);
    else say(ELSEWHERE[kind](id));
  });
  return made;
}

/** Return a button with the beginning of an id, which copies all of it. */
export function idButton(id) {
  const made = button(shortId(id), `Copy the id ${id}`, async () => {
    try {
      await navigator.clipboard.writeText(id); // there is none without TLS, except on this machine
      say(`Copied: ${id}`);
    } catch {
      say(`The id is ${id}`);
    }
  });
  made.className = "id";
  made.title = id;
  return made;
}
