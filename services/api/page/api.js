// Requests to the REST API, with the session's cookie.

const READ_MS = 20_000; // lists answer in milliseconds, and wait some seconds where many ask for the same
const SUMS_MS = 45_000; // of a long history, where many ask for the same
const CHANGE_MS = 45_000; // longer than nodes, log and projections together may take over a change
const NO_SESSION = "this browser's session has ended: the command `unicron open` prints a link to another one";
const LATE = "the server has not answered in time";

/** An answer of the API that is an error; `status` 0: there was no answer. */
export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

async function detailOf(answer) {
  if (answer.status === 401) return NO_SESSION; // the server also speaks of tokens, which no browser has
  try {
    return (await answer.json()).detail ?? answer.statusText;
  } catch {
    return answer.statusText; // no problem document: a proxy's answer
  }
}

/** Send a request; return what `read` makes of an answer that is no error. */
export async function request(path, options, read) {
  let answer;
  try {
    answer = await fetch(path, { credentials: "same-origin", cache: "no-store", ...options });
    if (answer.ok) return await read(answer);
  } catch (error) {
    throw error instanceof Problem ? error : new Problem(0, error.name === "TimeoutError" ? LATE : "the server does not answer");
  }
  throw new Problem(answer.status, await detailOf(answer));
}

function json(answer) {
  return answer.json();
}

function at(path, parameters) {
  const query = new URLSearchParams(parameters).toString();
  return query ? `${path}?${query}` : path;
}

/** Return the JSON at a path. */
export function get(path, parameters = {}) {
  return request(at(path, parameters), { signal: AbortSignal.timeout(READ_MS) }, json);
}

/** Return the JSON at a path that adds up a history. */
export function getSums(path, parameters = {}) {
  return request(at(path, parameters), { signal: AbortSignal.timeout(SUMS_MS) }, json);
}

/** Return the JSON at a path, and the tag by which a change says what it is a change of. */
export function tagged(path) {
  return request(path, { signal: AbortSignal.timeout(READ_MS) },
    async (answer) => ({ found: await answer.json(), tag: answer.headers.get("ETag") }));
}

function change(method, path, body, type = "application/json", headers = {}) {
  const signal = AbortSignal.timeout(CHANGE_MS);
  return request(path, { method, body, signal, headers: { "Content-Type": type, ...headers } }, json);
}

/** Ask for a change; return the JSON of the answer. */
export function post(path, body, { type, headers } = {}) {
  return change("POST", path, body, type, headers);
}

/** Change fields of what is as it was when `tag` was read: 412 if it is not; return the JSON of the answer. */
export function patch(path, fields, tag) {
  return change("PATCH", path, JSON.stringify(fields), "application/merge-patch+json", { "If-Match": tag });
}

/** Delete what is at a path; return the JSON of the answer. */
export function remove(path) {
  return change("DELETE", path);
}

/** Return a random text, for the header Idempotency-Key. */
export function randomKey() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
