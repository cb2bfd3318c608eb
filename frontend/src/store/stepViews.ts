/** What panels derive from the steps held. Pure. */
import type { Metric } from "../api/types";
import type { StepStore } from "./stepStore";

/** Step times as a curve. */
export function durations(store: StepStore): {
  readonly steps: readonly number[];
  readonly values: number[];
} {
  return { steps: store.steps, values: store.steps.map((step) => store.durationOf(step) ?? Number.NaN) };
}

/** Range of a magnitude in view, from zero: a colour then means the same share everywhere. */
export function valueDomain(
  store: StepStore,
  metric: Metric,
  first: number,
  last: number,
): { low: number; high: number } {
  let high = 0;
  for (const value of store.matrix(metric, first, last).values) if (value > high) high = value;
  return { low: 0, high: high || 1 };
}

/** Median of one metric of a rank over the newest `count` steps up to `upTo`. */
export function recentMedian(
  store: StepStore,
  metric: string,
  rank: number,
  upTo: number,
  count: number,
): number | undefined {
  const values: number[] = [];
  for (let step = upTo; step > upTo - count; step -= 1) {
    const value = store.value(metric, rank, step);
    if (value !== undefined) values.push(value);
  }
  values.sort((left, right) => left - right);
  return values[Math.floor(values.length / 2)];
}

export interface RankShare {
  /** Shares of the step, 0 to 1. */
  readonly compute: number;
  readonly wait: number;
  readonly slowdown: number | undefined;
}

const RECENT = 8;

/** How a rank spent its newest steps up to `upTo`. */
export function rankShare(store: StepStore, rank: number, upTo: number): RankShare {
  const of = (metric: string): number | undefined => recentMedian(store, metric, rank, upTo, RECENT);
  const step = of("step") ?? store.durationOf(upTo) ?? 0;
  const share = (metric: string): number =>
    step > 0 ? Math.min(1, Math.max(0, (of(metric) ?? 0) / step)) : 0;
  return { compute: share("compute"), wait: share("wait"), slowdown: of("slowdown") };
}
