// The stream of events, followed for ever, and the pauses after which what has failed is tried again.

import { Problem, request } from "./api.js";

const BEGIN_MS = 20_000; // for the first line, which is sent at once
const SILENT_MS = 45_000; // three of the server's keep-alive comments
const FIRST_PAUSE_MS = 1000;
const LONGEST_PAUSE_MS = 10_000;

/** Return for how long to wait after so many failures in a row; by chance, so that not all pages ask at once. */
export function pauseMs(failures) {
  const longest_ms = Math.min(FIRST_PAUSE_MS * 2 ** Math.max(failures - 1, 0), LONGEST_PAUSE_MS);
  return longest_ms * (0.5 + Math.random() / 2);
}

/** Read a stream up to its end, line by line. `postpone`: called with whatever comes. */
export async function readLines(answer, postpone, onLine) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    postpone();
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    lines.forEach(onLine);
  }
}

/** Connect once, behind a position of the log or at its end; return when the stream ends. */
async function connect(position, silence, onConnected, onLine) {
  let timer = setTimeout(() => silence.abort(), BEGIN_MS);
  const postpone = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silence.abort(), SILENT_MS);
  };
  const behind = position === null ? "last=0" : `after=${position}`;
  try {
    await request(`/v1/events?follow=true&brief=true&${behind}`, { signal: silence.signal }, (answer) => {
      postpone();
      onConnected();
      return readLines(answer, postpone, onLine);
    });
  } finally {
    clearTimeout(timer);
  }
}

/**
 * Follow the log from now on, for ever. EventSource needs the names of all types of events, and says of a refusal
 * neither its status nor its reason.
 *
 * @param onEvent called with the type of each event.
 * @param onState called with "connected", or with the Problem that has interrupted the stream.
 * @returns `again`, which ends a pause, and `cut`, which ends a connection, as if it had failed.
 */
export function follow(onEvent, onState) {
  let position = null;
  let endPause = () => {};
  let silence = null;
  const onLine = (line) => {
    if (line.startsWith("id: ")) position = line.slice(4);
    else if (line.startsWith("event: ")) onEvent(line.slice(7));
  };
  const run = async () => {
    for (let failures = 1; ; failures += 1) {
      const onConnected = () => {
        failures = 1;
        onState("connected");
      };
      try {
        silence = new AbortController();
        await connect(position, silence, onConnected, onLine);
        onState(new Problem(0, "the stream of events has ended"));
      } catch (error) {
        if (!(error instanceof Problem)) throw error;
        onState(error);
      }
      await new Promise((resolve) => {
        endPause = resolve;
        setTimeout(resolve, pauseMs(failures));
      });
    }
  };
  run();
  return { again: () => endPause(), cut: () => silence.abort() };
}
