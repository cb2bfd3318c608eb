/** Round positions for axis labels. */

const ROUND = [1, 2, 5, 10];

/** The round step (1, 2 or 5 times a power of ten) that gives at most `count` ticks over `size`. */
export function tickStep(size: number, count: number): number {
  const raw = Math.max(size, Number.MIN_VALUE) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  return power * (ROUND.find((factor) => factor * power >= raw * (1 - 1e-9)) ?? 10);
}

/** Round values within [from, to], at most about `count`; `smallest` keeps step axes on whole numbers. */
export function ticks(from: number, to: number, count: number, smallest = 0): number[] {
  if (!(to > from)) return [];
  const step = Math.max(tickStep(to - from, count), smallest);
  const first = Math.ceil(from / step - 1e-9);
  const last = Math.floor(to / step + 1e-9);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, index) => (first + index) * step);
}
