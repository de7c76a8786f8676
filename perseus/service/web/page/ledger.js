/** Energy used and saved, in words: accounts of the ledger and periods of time. Pure. */

import * as n from "./numbers.js";

export const UNKNOWN = "unknown";

/** The periods to choose from. The ledger counts by hours of UTC, so days and months are UTC's, too. */
export const PERIODS = [
  ["today", "today"],
  ["week", "7 days"],
  ["month", "this month"],
  ["last-month", "last month"],
];

const HOUR_MS = 3_600_000;

/** Begin and end of a period, seen from a time: milliseconds since 1970; `end_ms` is null while it lasts. */
export function period(name, now_ms) {
  const now = new Date(now_ms);
  const [year, month, day] = [now.getUTCFullYear(), now.getUTCMonth(), now.getUTCDate()];
  switch (name) {
    case "today":
      return { start_ms: Date.UTC(year, month, day), end_ms: null };
    case "week":
      return { start_ms: Math.floor(now_ms / HOUR_MS) * HOUR_MS - 7 * 24 * HOUR_MS, end_ms: null };
    case "month":
      return { start_ms: Date.UTC(year, month, 1), end_ms: null };
    default:
      return { start_ms: Date.UTC(year, month - 1, 1), end_ms: Date.UTC(year, month, 1) };
  }
}

/** The same in words: "2026-11-01 00:00 UTC to now". */
export function periodWords({ start_ms, end_ms }) {
  const at = (time_ms) => new Date(time_ms).toISOString().slice(0, 16).replace("T", " ");
  return end_ms === null ? `${at(start_ms)} UTC to now` : `${at(start_ms)} to ${at(end_ms)} UTC`;
}

/** Entries by job, in their order: `{jobId, isDeleted, entries, account}`. */
export function byJob(entries) {
  const groups = [];
  for (const entry of entries) {
    const last = groups.at(-1);
    if (last?.jobId === entry.job_id && last.isDeleted === entry.is_deleted) last.entries.push(entry);
    else groups.push({ jobId: entry.job_id, isDeleted: entry.is_deleted, entries: [entry] });
  }
  return groups.map((group) => ({ ...group, account: together(group.entries.map(({ account }) => account)) }));
}

/**
 * The account of some runs together. The interval of their joint savings can't be added up, and is absent. So is
 * each value that is unknown for some of them, except savings, which cover the runs that have a baseline.
 */
export function together(accounts) {
  if (accounts.length === 1) return accounts[0];
  const sum = (name) => accounts.reduce((total, account) => total + Number(account[name]), 0);
  const ofAll = (name) => (accounts.every((account) => account[name] !== undefined) ? sum(name) : undefined);
  const ofSome = (name) => {
    const known = accounts.map((account) => account[name]).filter((value) => value !== undefined);
    return known.length ? known.reduce((total, value) => total + value, 0) : undefined;
  };
  const [cost, carbon_g] = [ofAll("cost"), ofAll("carbon_g")];
  const [energy_kwh, uncompared_energy_kwh] = [sum("energy_kwh"), sum("uncompared_energy_kwh")];
  const saved_energy_kwh = ofSome("saved_energy_kwh");
  const stock_kwh = energy_kwh - uncompared_energy_kwh + saved_energy_kwh;
  return {
    iteration_count: sum("iteration_count"),
    unmeasured_iteration_count: sum("unmeasured_iteration_count"),
    energy_kwh,
    cost,
    carbon_g,
    uncompared_energy_kwh,
    saved_energy_kwh,
    saved_percent: stock_kwh > 0 ? (100 * saved_energy_kwh) / stock_kwh : undefined,
    saved_cost: cost === undefined ? undefined : ofSome("saved_cost"),
    saved_carbon_g: carbon_g === undefined ? undefined : ofSome("saved_carbon_g"),
    profiling_energy_kwh: sum("profiling_energy_kwh"),
    profiling_extra_energy_kwh: ofSome("profiling_extra_energy_kwh"),
    straggler_energy_kwh: sum("straggler_energy_kwh"),
    price_per_kwh: energy_kwh > 0 && cost !== undefined ? cost / energy_kwh : undefined,
    intensity_g_per_kwh: energy_kwh > 0 && carbon_g !== undefined ? carbon_g / energy_kwh : undefined,
  };
}

/** A value in words, or "unknown". */
export const known = (value, words) => (value === undefined ? UNKNOWN : words(value));

/** The energy saved, with half its 95 % interval where that is known. */
export function savedEnergy({ saved_energy_kwh: saved, saved_energy_margin_kwh: margin }) {
  if (saved === undefined) return UNKNOWN;
  return margin === undefined ? n.kilowattHours(saved) : n.kilowattHoursWithin(saved, margin);
}

/** Caveats of the figures: what they leave out, and what they understate. */
export function caveats(account) {
  const notes = [];
  if (account.saved_energy_kwh === undefined) notes.push("Saving unknown: no stock baseline was measured.");
  else if (account.saved_energy_margin_kwh === undefined) notes.push("The uncertainty of the saving is unknown.");
  if (account.straggler_energy_kwh > 0)
    notes.push(`${n.kilowattHours(account.straggler_energy_kwh)} with a straggler: their saving is understated.`);
  const unmeasured = Number(account.unmeasured_iteration_count);
  if (unmeasured > 0) notes.push(`${n.count(unmeasured, "iteration")} without measurements of all GPUs.`);
  return notes;
}

/** The prices and intensities behind cost and carbon, or why there are none: settings in full, unrounded. */
export function assumptions({ price_per_kwh: price, intensity_g_per_kwh: intensity }) {
  const format = (value, unit) => (value === undefined ? `${UNKNOWN}: not set` : `${Number(value.toPrecision(6))}${unit}`);
  return [
    ["price per kWh", format(price, "")],
    ["CO₂ per kWh", format(intensity, " g")],
  ];
}
