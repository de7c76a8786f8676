/** Numbers for people: with units, in readable precision, and as wide as their neighbours. */

const MINUS = "−";
const NARROW = "\u202f";
const UNKNOWN = "–";

/** A number with so many decimals, grouped thousands, a true minus, and never "−0". */
export function fixed(value, digits = 0) {
  if (!Number.isFinite(value)) return UNKNOWN;
  const text = Math.abs(value).toFixed(digits);
  const [whole, part] = text.split(".");
  const grouped = whole.length > 4 ? whole.replace(/\B(?=(\d{3})+$)/g, NARROW) : whole;
  const isNegative = value < 0 && Number(text) !== 0;
  return (isNegative ? MINUS : "") + grouped + (part === undefined ? "" : `.${part}`);
}

/** As `fixed`, with a sign unless it is zero. */
export function signed(value, digits = 0) {
  const text = fixed(value, digits);
  return value > 0 && Number(value.toFixed(digits)) !== 0 ? `+${text}` : text;
}

/** Each for values from its limit on: below 0.1 in smaller units. */
const PREFIXES = [
  [1e9, 1e9, "G"],
  [1e6, 1e6, "M"],
  [1e3, 1e3, "k"],
  [0.1, 1, ""],
  [1e-3, 1e-3, "m"],
  [1e-6, 1e-6, "µ"],
  [0, 1e-9, "n"],
];

function scaled(value, unit, digits) {
  if (!Number.isFinite(value)) return UNKNOWN;
  const size = value === 0 ? 1 : Math.abs(value);
  const [, factor, prefix] = PREFIXES.find(([limit]) => size >= limit);
  const shown = value / factor;
  const decimals = Math.max(0, digits - String(Math.trunc(Math.abs(shown))).length);
  return `${fixed(shown, prefix === "" && Math.abs(shown) >= 100 ? 0 : decimals)} ${prefix}${unit}`;
}

/** Energy: 3,412 J is "3.412 kJ". */
export const joules = (value) => scaled(value, "J", 4);

/** Power: 1,234 W is "1.23 kW". */
export const watts = (value) => scaled(value, "W", 3);

/** Decimals of amounts that are compared down a column: so many, and more where those would show only zeros. */
const decimalsOf = (value, decimals) => {
  const size = Math.abs(value);
  if (size === 0 || !Number.isFinite(size)) return 0;
  if (size >= 1_000) return 1;
  return size >= 10 ** (1 - decimals) ? decimals : Math.min(12, 2 - Math.floor(Math.log10(size)));
};

/** Energy as it is billed. */
export const kilowattHours = (value) => `${fixed(value, decimalsOf(value, 3))} kWh`;

export const signedKilowattHours = (value) => `${signed(value, decimalsOf(value, 3))} kWh`;

/** Energy with half its interval, both in the precision that the finer one needs. */
export function kilowattHoursWithin(value, margin) {
  const digits = margin > 0 ? Math.min(12, 1 - Math.floor(Math.log10(margin))) : 0;
  const decimals = Math.max(decimalsOf(value, 3), digits);
  return `${fixed(value, decimals)} ± ${fixed(margin, decimals)} kWh`;
}

/** Money, in any currency. */
export const money = (value) => fixed(value, value === 0 ? 0 : Math.abs(value) >= 1 ? 2 : decimalsOf(value, 2));

/** Carbon dioxide: grams, kilograms, tonnes. */
export function grams(value) {
  const [factor, unit] = [[1e6, "t"], [1e3, "kg"]].find(([each]) => Math.abs(value) >= each) ?? [1, "g"];
  return `${fixed(value / factor, decimalsOf(value / factor, 2))} ${unit}`;
}

/** Iteration times and the like: three decimals from 0.1 s, one from 100 s; below 0.1 s "12.34 ms". */
export function seconds(value) {
  if (!Number.isFinite(value)) return UNKNOWN;
  if (value !== 0 && Math.abs(value) < 0.1) return scaled(value, "s", 4);
  return `${fixed(value, Math.abs(value) < 100 ? 3 : 1)} s`;
}

/** Parts of an iteration. */
export function milliseconds(value_s) {
  if (!Number.isFinite(value_s)) return UNKNOWN;
  const value = 1000 * value_s;
  if (value !== 0 && Math.abs(value) < 0.1) return scaled(value_s, "s", 3);
  return `${fixed(value, Math.abs(value) < 100 ? 1 : 0)} ms`;
}

/** How long something takes or took: "41 s", "3 min 05 s", "2 h 10 min", "3 d 4 h". */
export function span(value_s) {
  if (!Number.isFinite(value_s)) return UNKNOWN;
  const whole = Math.max(0, Math.round(value_s));
  const [minutes, hours, days] = [Math.floor(whole / 60), Math.floor(whole / 3600), Math.floor(whole / 86400)];
  if (minutes === 0) return `${whole} s`;
  if (hours === 0) return `${minutes} min ${two(whole % 60)} s`;
  if (days === 0) return `${hours} h ${two(minutes % 60)} min`;
  return `${days} d ${hours % 24} h`;
}

/** Percent; `change` has a sign. */
export const percent = (value, digits = 1) => `${fixed(value, digits)} %`;
export const change = (value, digits = 1) => `${signed(value, digits)} %`;

/** A mean in percent with half its 95 % interval, where that is known. */
export function withError(mean, error, digits = 1) {
  const shown = fixed(mean, digits);
  return error === undefined || error === null ? `${shown} %` : `${shown} ± ${fixed(error, digits)} %`;
}

/** "1 rank", "8 ranks". */
export function count(number, one, many = `${one}s`) {
  return `${fixed(number)} ${number === 1 ? one : many}`;
}

/** Numbers as ranges: [0, 1, 2, 5] is "0–2, 5". */
export function ranges(numbers) {
  const parts = [];
  for (const number of [...numbers].sort((one, other) => one - other)) {
    const last = parts.at(-1);
    if (last && last[1] === number - 1) last[1] = number;
    else parts.push([number, number]);
  }
  return parts.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ");
}

/** A time of day in the reader's time zone, with the date unless it is today. */
export function clock(timestamp) {
  const at = new Date(timestamp);
  if (Number.isNaN(at.getTime())) return UNKNOWN;
  const time = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  const isToday = at.toDateString() === new Date().toDateString();
  return isToday ? time : `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${time}`;
}

/** Ticks of an axis between two values: about `wanted` of them, at steps of 1, 2 or 5 times a power of ten. */
export function ticks(low, high, wanted) {
  const raw = (high - low) / Math.max(1, wanted);
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) found.push(at * step);
  return found;
}

const two = (number) => String(number).padStart(2, "0");
