// What the ranks of a task print: text alone, the newest lines, followed as they come.

import { Problem, request } from "./api.js";
import { byId, element, keyed, setText } from "./dom.js";
import { pauseMs, readLines } from "./stream.js";
import { count } from "./text.js";

const FIRST_LINES = 200; // of each rank
const NEWEST_BYTES = 32768; // that are read of half a second's output: more than anybody reads as it comes
const MOST_LINES = 5000; // that a browser lays out at once
const SHOW_MS = 250;
const ENDED = new Set(["stopped", "succeeded", "failed"]);
const FORBIDDEN = 403;
// Sequences that control a terminal, and control characters but the tabulator.
const CONTROL = /\u001b\[[0-?]*[ -/]*[@-~]|\u001b\][^\u0007\u001b]*(?:\u0007|\u001b\\)|\u001b[@-_]|[\u0000-\u0008\u000a-\u001f\u007f-\u009f]/g;

let lines = [];
let dropped = 0;
let lastLines = FIRST_LINES;
let reading = null; // what ends the present request
let asked = ""; // whose output is read
let over = false; // whether the task has ended: nothing more comes
let again = () => {}; // shows the output of the same task
let timer = null;
let problem = "";

/** Read the output from now on, unless that is done already. `path`: of the task in the API. */
export function showOutput(task, path) {
  const ranks = task.ranks.map(({ rank, worker }) => ({ value: String(rank), text: `rank ${rank}, ${worker}` }));
  keyed(byId("output-rank"), [{ value: "", text: "all ranks" }, ...ranks], {
    key: ({ value }) => value,
    make: ({ value }) => element("option", { value }),
    update: (option, { text }) => { option.textContent = text; },
  });
  over = ENDED.has(task.state);
  again = () => showOutput(task, path);
  const rank = byId("output-rank").value;
  const source = JSON.stringify([path, rank, lastLines, task.attempt]);
  if (source === asked || document.hidden) return;
  stopOutput();
  asked = source;
  reading = new AbortController();
  follow(`${path}/logs?follow=true&tail=${lastLines}&newest_bytes=${NEWEST_BYTES}${rank === "" ? "" : `&rank=${rank}`}`, reading);
}

/** End the request, as where nobody sees the page; the next `showOutput` begins anew. */
export function stopOutput() {
  reading?.abort();
  asked = "";
}

async function follow(path, own) {
  for (let failures = 1; !own.signal.aborted; failures += 1) {
    problem = "";
    try {
      await request(path, { signal: own.signal, headers: { Accept: "application/x-ndjson" } }, (answer) => {
        lines = [];
        dropped = 0;
        return readLines(answer, () => {}, take);
      });
      if (over) return;
    } catch (error) {
      if (own.signal.aborted) return;
      if (!(error instanceof Problem)) throw error;
      problem = error.message;
      later();
      if (error.status === FORBIDDEN) return;
    }
    await new Promise((resolve) => { setTimeout(resolve, pauseMs(failures)); });
  }
}

function take(text) {
  const said = JSON.parse(text);
  const line = said.line === undefined ? `unicron: ${said.problem}` : `${said.worker} g${said.generation} | ${plain(said.line)}`;
  lines.push(line);
  if (lines.length > 2 * MOST_LINES) {
    dropped += lines.length - MOST_LINES;
    lines = lines.slice(-MOST_LINES);
  }
  later();
}

/** Return a line as a terminal would have left it: what a carriage return has written over is gone. */
function plain(text) {
  return text.slice(text.lastIndexOf("\r", text.length - 2) + 1).replace(CONTROL, "");
}

function later() {
  timer ??= setTimeout(() => {
    timer = null;
    show();
  }, SHOW_MS);
}

function show() {
  const wanted = byId("output-search").value.toLowerCase();
  const found = (wanted ? lines.filter((line) => line.toLowerCase().includes(wanted)) : lines).slice(-MOST_LINES);
  const place = byId("output-text");
  const atEnd = place.scrollHeight - place.scrollTop - place.clientHeight < 40;
  setText(place, found.join("\n"));
  if (atEnd) place.scrollTop = place.scrollHeight;
  const parts = [wanted ? `${found.length.toLocaleString("en")} of ${count(lines.length, "line")} have it` : count(found.length, "line")];
  if (dropped) parts.push(`${count(dropped, "older line")} left out`);
  if (problem) parts.push(`▲ ${problem}`);
  setText(byId("output-count"), parts.join("; "));
}

byId("output-search").addEventListener("input", later);
byId("output-rank").addEventListener("change", () => again());
byId("output-earlier").addEventListener("click", () => {
  lastLines = Math.min(lastLines * 4, MOST_LINES);
  again();
});
