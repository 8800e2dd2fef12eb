// Requests to the REST API, with the session's cookie.

const SILENT_MS = 45_000; // three of the server's keep-alive comments
const RETRY_MS = [500, 1000, 2000, 5000, 10_000];

/** An answer of the API that is an error; `status` 0: there was no answer. */
export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

async function request(path, options) {
  let answer;
  try {
    answer = await fetch(path, { credentials: "same-origin", cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "the server does not answer");
  }
  if (answer.ok) return answer;
  let detail = answer.statusText;
  try {
    detail = (await answer.json()).detail ?? detail;
  } catch {
    // no problem document: a proxy's answer
  }
  throw new Problem(answer.status, detail);
}

/** Return the JSON at a path. */
export async function get(path, parameters = {}) {
  const query = new URLSearchParams(parameters).toString();
  return (await request(query ? `${path}?${query}` : path)).json();
}

/** Return the JSON at a path, and the tag by which a change says what it is a change of. */
export async function tagged(path) {
  const answer = await request(path);
  return { found: await answer.json(), tag: answer.headers.get("ETag") };
}

async function change(method, path, body, type, headers) {
  return (await request(path, { method, body, headers: { "Content-Type": type, ...headers } })).json();
}

/** Ask for a change; return the JSON of the answer. */
export function post(path, body, { type = "application/json", headers = {} } = {}) {
  return change("POST", path, body, type, headers);
}

/** Change fields of what is as it was when `tag` was read: 412 if it is not; return the JSON of the answer. */
export function patch(path, fields, tag) {
  return change("PATCH", path, JSON.stringify(fields), "application/merge-patch+json", { "If-Match": tag });
}

/** Return a random text, for the header Idempotency-Key. */
export function randomKey() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * Follow the log from now on, for ever. EventSource needs the names of all types of events, and says of a refusal
 * neither its status nor its reason.
 *
 * @param onEvent called with the type of each event.
 * @param onState called with "connected", or with the Problem that has interrupted the stream.
 */
export async function follow(onEvent, onState) {
  let position = null;
  for (let failures = 0; ; failures += 1) {
    const silence = new AbortController();
    let timer = setTimeout(() => silence.abort(), SILENT_MS);
    try {
      const query = position === null ? "last=0" : `after=${position}`;
      const answer = await request(`/v1/events?follow=true&brief=true&${query}`, { signal: silence.signal });
      onState("connected");
      failures = 0;
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        clearTimeout(timer);
        timer = setTimeout(() => silence.abort(), SILENT_MS);
        const lines = (rest + value).split("\n");
        rest = lines.pop();
        for (const line of lines) {
          if (line.startsWith("id: ")) position = line.slice(4);
          else if (line.startsWith("event: ")) onEvent(line.slice(7));
        }
      }
      onState(new Problem(0, "the stream of events has ended"));
    } catch (error) {
      onState(error instanceof Problem ? error : new Problem(0, "the stream of events was interrupted"));
      if (error.status === 401) return;
    } finally {
      clearTimeout(timer);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
  }
}
