// The incidents of the chart's window: the whole window is asked for once, then what was detected since.

import { getSums } from "./api.js";

const MOST = 200; // more lines than can be told apart
const OVERLAP_MS = 60_000; // an incident may be logged some time after its detection

let incidents = new Map();
let from_ms = Infinity; // where the window began
let complete_ms = Infinity; // from when on there are all of them

function detectedMs(incident) {
  return Date.parse(incident.detected_at);
}

/** Return the newest incidents that were detected since a time, and whether there are more than `MOST`. */
async function read(since_ms) {
  const parameters = { since: new Date(since_ms).toISOString(), order: "newest", limit: MOST };
  const { items, next_cursor } = await getSums("/v1/incidents", parameters);
  const found = items.map(({ id, kind, severity, node, worker, occurred_at, detected_at }) =>
    ({ id, kind, severity, node, worker, occurred_at, detected_at })); // not what it cost, which changes
  return { found, more: next_cursor !== null };
}

/** Return the incidents since a time, the newest first; `more`: there are others, which are older. */
export async function incidentsSince(start_ms) {
  const whole = start_ms < from_ms;
  const newest_ms = Math.max(...[...incidents.values()].map(detectedMs));
  const since_ms = whole ? start_ms : Math.max(start_ms, (Number.isFinite(newest_ms) ? newest_ms : from_ms) - OVERLAP_MS);
  const { found, more } = await read(since_ms);
  const all = new Map([...(whole || more ? [] : incidents.values()), ...found].map((one) => [one.id, one]));
  const sorted = [...all.values()].sort((one, other) => detectedMs(other) - detectedMs(one));
  const kept = sorted.slice(0, MOST).filter((one) => detectedMs(one) >= start_ms);
  if (whole) complete_ms = start_ms;
  if (kept.length && (more || sorted.length > MOST)) complete_ms = detectedMs(kept.at(-1));
  from_ms = start_ms;
  incidents = new Map(kept.map((one) => [one.id, one]));
  return { items: kept, more: complete_ms > start_ms };
}
