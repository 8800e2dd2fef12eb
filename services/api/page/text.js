// Numbers and times as people read them.

const PREFIXES = ["", "k", "M", "G", "T", "P", "E", "Z"];
const NONE = "–";
const SHORT_ID = 8; // as the command shows ids

/** Return a number with an SI prefix and three digits. */
export function si(value, unit = "") {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  let scaled = Math.abs(value);
  let index = 0;
  while (scaled >= 999.5 && index < PREFIXES.length - 1) {
    scaled /= 1000;
    index += 1;
  }
  const digits = scaled >= 99.95 || scaled === 0 ? 0 : scaled >= 9.995 ? 1 : 2;
  return `${value < 0 ? "-" : ""}${scaled.toFixed(digits)} ${PREFIXES[index]}${unit}`.trim();
}

/** Return a duration in seconds as text. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NONE;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 119.95) return `${seconds.toFixed(1)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.round(seconds / 3600);
  return hours < 48 ? `${hours} h` : `${Math.round(seconds / 86400)} days`;
}

/** Return what a stuck incident takes longer than. `usual_s`: median of its kind; null: none was healed before. */
export function thanUsual(usual_s) {
  return usual_s === null ? "is allowed where none of its kind was healed before" : `usual (median ${duration(usual_s)})`;
}

/** Return the seconds between two times of the API; null where one is missing. */
export function secondsBetween(start, end) {
  return start && end ? (Date.parse(end) - Date.parse(start)) / 1000 : null;
}

/** Return a time as date and time of day in UTC, as post-mortems say it. */
export function clock(at) {
  return new Date(at).toISOString().slice(0, 19).replace("T", " ");
}

/** Return the time of day in UTC. */
export function timeOfDay(at) {
  return clock(at).slice(11);
}

/** Return a time as it is where this browser is. */
export function localTime(at) {
  return new Date(at).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "long" });
}

/** Return times of an axis in UTC, in seconds since 1970, no finer than their distance. */
export function axisTimes(times_s) {
  const step_s = times_s.length > 1 ? times_s[1] - times_s[0] : 0;
  const [from, to] = step_s >= 86_400 ? [5, 10] : step_s >= 10_800 ? [5, 16] : step_s >= 60 ? [11, 16] : [11, 19];
  return times_s.map((at_s) => new Date(at_s * 1000).toISOString().slice(from, to).replace("T", " "));
}

/** Return a part of one as a percentage. */
export function percent(fraction) {
  return fraction === null || fraction === undefined ? NONE : `${(fraction * 100).toFixed(1)} %`;
}

/** Return an amount of money. */
export function money(amount, currency) {
  return amount === null || amount === undefined ? NONE : `${amount.toFixed(2)} ${currency}`;
}

/** Return a number with its noun. */
export function count(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

/** Return the beginning of an id. */
export function shortId(id) {
  return id.slice(0, SHORT_ID);
}

/** Return the sentence that says that a list is not whole; nothing where it is. */
export function moreText(more, number, noun, command) {
  return more ? `Only the newest ${count(number, noun)} are shown; the command ${command} lists all.` : "";
}
