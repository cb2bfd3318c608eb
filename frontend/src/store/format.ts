/** Numbers and times as people read them. Every function is total: what is absent reads as an en dash. */

export const ABSENT = "–";

type Maybe = number | null | undefined;

const given = (value: Maybe): value is number =>
  value !== null && value !== undefined && Number.isFinite(value);

/** 1,234 */
export function integer(value: Maybe): string {
  return given(value) ? Math.round(value).toLocaleString("en") : ABSENT;
}

/** Three significant digits at least, thousands as k and M: 12.4k */
export function compact(value: Maybe): string {
  if (!given(value)) return ABSENT;
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${(value / 1e3).toPrecision(3)}k`;
  return size >= 100 ? integer(value) : value.toPrecision(3);
}

/** A loss: four digits after the point below 100. */
export function loss(value: Maybe): string {
  return given(value) ? (Math.abs(value) < 100 ? value.toFixed(4) : value.toPrecision(4)) : ABSENT;
}

/** A short duration with its unit: 1.25 s, 84 ms, 3.1 µs */
export function seconds(value: Maybe): string {
  if (!given(value)) return ABSENT;
  const size = Math.abs(value);
  if (size >= 100) return `${Math.round(value)} s`;
  if (size >= 1) return `${trimmed(value)} s`;
  if (size >= 1e-3) return `${trimmed(value * 1e3)} ms`;
  return size === 0 ? "0 s" : `${trimmed(value * 1e6)} µs`;
}

const trimmed = (value: number): string =>
  Math.abs(value) >= 99.5 ? value.toFixed(0) : Math.abs(value) >= 9.95 ? value.toFixed(1) : value.toFixed(2);

/** A long duration in two units: 1 h 12 min, 3 min 20 s, 12 s */
export function duration(value: Maybe): string {
  if (!given(value)) return ABSENT;
  const whole = Math.max(0, Math.round(value));
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60];
  if (hours >= 48) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  if (hours > 0) return `${hours} h ${minutes} min`;
  return minutes > 0 ? `${minutes} min ${rest} s` : `${rest} s`;
}

/** A ratio: 1.42× */
export function ratio(value: Maybe): string {
  return given(value) ? `${value.toFixed(value >= 10 ? 1 : 2)}×` : ABSENT;
}

/** A share of one as per cent: 31 % */
export function percent(value: Maybe): string {
  return given(value) ? `${Math.round(value * 100)} %` : ABSENT;
}

/** A size in binary units: 1.5 MiB */
export function bytes(value: Maybe): string {
  if (!given(value)) return ABSENT;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = value < 1 ? 0 : Math.min(Math.floor(Math.log2(value) / 10), units.length - 1);
  const scaled = value / 1024 ** power;
  return `${power === 0 ? scaled : trimmed(scaled)} ${units[power] ?? "B"}`;
}

/** Time of day of real time in seconds: 10:42:07 */
export function clock(value: Maybe): string {
  return given(value) ? new Date(value * 1000).toLocaleTimeString("en-GB") : ABSENT;
}

/** Label of an axis tick in seconds, with the unit fitting the tick distance. */
export function secondsTick(value: number, step: number): string {
  if (step >= 0.5) return `${value.toFixed(step % 1 === 0 ? 0 : 1)} s`;
  if (step >= 1e-3) return `${+(value * 1e3).toFixed(step >= 1e-2 ? 0 : 1)} ms`;
  return `${+(value * 1e6).toFixed(1)} µs`;
}

/** "rank 2", "ranks 2 and 3", "ranks 1, 2 and 3" */
export function rankList(ranks: readonly number[]): string {
  const [first] = ranks;
  if (first === undefined) return "no rank";
  if (ranks.length === 1) return `rank ${first}`;
  return `ranks ${ranks.slice(0, -1).join(", ")} and ${ranks.at(-1)}`;
}
