// Numbers and times as people read them.

const PREFIXES = ["", "k", "M", "G", "T", "P", "E", "Z"];
const NONE = "–";
const TO_THE_SECOND = { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" };
const TO_THE_MINUTE = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
const DAY = { month: "2-digit", day: "2-digit" };

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

/** Return the seconds between two times of the API; null where one is missing. */
export function secondsBetween(start, end) {
  return start && end ? (Date.parse(end) - Date.parse(start)) / 1000 : null;
}

/** Return a time of the API in this browser's time zone. */
export function clock(at) {
  const time = new Date(at);
  const today = time.toDateString() === new Date().toDateString();
  const date = today ? {} : { year: "numeric", month: "2-digit", day: "2-digit" };
  return time.toLocaleString(undefined, { ...date, ...TO_THE_SECOND });
}

/** Return times of an axis, in seconds since 1970, no finer than their distance. */
export function axisTimes(times_s) {
  const step_s = times_s.length > 1 ? times_s[1] - times_s[0] : 0;
  const options = step_s >= 86_400 ? DAY : step_s >= 10_800 ? { ...DAY, ...TO_THE_MINUTE } : step_s >= 60 ? TO_THE_MINUTE : TO_THE_SECOND;
  return times_s.map((at_s) => new Date(at_s * 1000).toLocaleString(undefined, options));
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
