/** Points of the curves by name, one value per step; a newer attempt's point replaces an older one's. */
import type { Series } from "../api/types";
import { oldest, position } from "./sorted";
import { CAPACITY } from "./stepStore";

type Points = Pick<Series, "attempts" | "steps" | "values">;

export interface Curve {
  readonly steps: number[];
  readonly values: number[];
  readonly attempts: number[];
}

export class SeriesStore {
  private readonly curves = new Map<string, Curve>();

  constructor(private readonly capacity = CAPACITY) {}

  curve(name: string): Curve {
    return this.curves.get(name) ?? { steps: [], values: [], attempts: [] };
  }

  /** The newest value of the newest attempt; NaN where that is no number, undefined without points. */
  newest(name: string): number | undefined {
    const { attempts, values } = this.curve(name);
    let newest = -1;
    attempts.forEach((attempt, index) => {
      if (attempt >= (attempts[newest] ?? 0)) newest = index;
    });
    return values[newest];
  }

  /**
   * Merge points that may arrive twice (history after a reconnect, then live ones). JSON has no NaN: the history says null
   * where a live point is NaN.
   */
  add(name: string, points: Points): void {
    const curve = this.curves.get(name) ?? { steps: [], values: [], attempts: [] };
    this.curves.set(name, curve);
    points.steps.forEach((step, index) => {
      const value = points.values[index];
      if (value !== undefined) put(curve, step, value ?? Number.NaN, points.attempts[index] ?? 0);
    });
    const gone = oldest(curve.attempts, this.capacity);
    if (gone.size === 0) return;
    const kept = (column: readonly number[]): number[] => column.filter((_, index) => !gone.has(index));
    this.curves.set(name, {
      steps: kept(curve.steps),
      values: kept(curve.values),
      attempts: kept(curve.attempts),
    });
  }
}

function put(curve: Curve, step: number, value: number, attempt: number): void {
  const at = position(curve.steps, step);
  const replaces = curve.steps[at] === step;
  if (replaces && (curve.attempts[at] ?? 0) > attempt) return;
  const removed = replaces ? 1 : 0;
  curve.steps.splice(at, removed, step);
  curve.values.splice(at, removed, value);
  curve.attempts.splice(at, removed, attempt);
}
