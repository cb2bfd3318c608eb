/**
 * Steps by ranks in typed arrays, outside of any reactivity: what curves and heat map draw. A step that was repeated in a
 * newer attempt replaces the older one. Bounded: the oldest steps of the oldest attempt are dropped first.
 */
import type { Heatmap, Metric, StepView } from "../api/types";
import { oldest, position } from "./sorted";

export interface StepsHeader {
  readonly attempt: number;
  readonly steps: readonly number[];
  readonly startsNs: readonly number[];
  readonly durationsNs: readonly number[];
  readonly ranks: readonly number[];
  readonly metrics: readonly string[];
}

interface StepRow {
  attempt: number;
  durationS: number;
  readonly metrics: Map<string, Float32Array>;
}

/** A window of one metric: values[rank row][step column], NaN where missing. */
export interface Matrix {
  readonly steps: readonly number[];
  readonly ranks: readonly number[];
  readonly values: Float32Array;
  /** By column: of which attempt it is; undefined where the step is not held. */
  readonly attempts: readonly (number | undefined)[];
}

export const CAPACITY = 4000;

export class StepStore {
  private readonly rows = new Map<number, StepRow>();
  private order: number[] = [];
  private rankList: number[] = [];
  private rowOfRank = new Map<number, number>();
  private last: { readonly attempt: number; readonly step: number } | undefined;

  constructor(private readonly capacity = CAPACITY) {}

  get ranks(): readonly number[] {
    return this.rankList;
  }

  /** Step numbers held, ascending. */
  get steps(): readonly number[] {
    return this.order;
  }

  /**
   * The newest step of the newest attempt. Steps with higher numbers may be held: an attempt that resumes from a
   * checkpoint begins below the last step of the one before.
   */
  get newest(): number | null {
    return this.last?.step ?? null;
  }

  attemptOf(step: number): number | undefined {
    return this.rows.get(step)?.attempt;
  }

  durationOf(step: number): number | undefined {
    return this.rows.get(step)?.durationS;
  }

  value(metric: string, rank: number, step: number): number | undefined {
    const value = this.rows.get(step)?.metrics.get(metric)?.[this.rowOfRank.get(rank) ?? -1];
    return value === undefined || Number.isNaN(value) ? undefined : value;
  }

  addSteps(views: readonly StepView[]): void {
    for (const { step, attempt, durationNs } of views) {
      const row = this.row(step, attempt);
      if (row) row.durationS = durationNs / 1e9;
    }
    this.trim();
  }

  addHeatmap(heatmap: Heatmap): void {
    this.learnRanks(heatmap.ranks);
    heatmap.steps.forEach((step, column) => {
      const row = this.row(step, heatmap.attempts[column] ?? 0);
      if (!row) return;
      const cells = this.cells(row, heatmap.metric);
      heatmap.ranks.forEach((rank, index) => {
        cells[this.rowOfRank.get(rank) ?? 0] = heatmap.values[index]?.[column] ?? Number.NaN;
      });
    });
    this.trim();
  }

  /** A STEPS frame: `body` is [metric][rank][step]. */
  addFrame(header: StepsHeader, body: Float32Array): void {
    this.learnRanks(header.ranks);
    const [stepCount, rankCount] = [header.steps.length, header.ranks.length];
    header.steps.forEach((step, column) => {
      const row = this.row(step, header.attempt);
      if (!row) return;
      row.durationS = (header.durationsNs[column] ?? Number.NaN) / 1e9;
      header.metrics.forEach((metric, plane) => {
        const cells = this.cells(row, metric);
        header.ranks.forEach((rank, index) => {
          const value = body[(plane * rankCount + index) * stepCount + column];
          cells[this.rowOfRank.get(rank) ?? 0] = value ?? Number.NaN;
        });
      });
    });
    this.trim();
  }

  /** Steps from..to of `metric` for all ranks, with a column for every step number of the range. */
  matrix(metric: Metric, from: number, to: number): Matrix {
    const count = Math.max(0, Math.floor(to) - Math.ceil(from) + 1);
    const steps = Array.from({ length: count }, (_, index) => Math.ceil(from) + index);
    const values = new Float32Array(this.rankList.length * count).fill(Number.NaN);
    steps.forEach((step, column) => {
      const cells = this.rows.get(step)?.metrics.get(metric);
      cells?.forEach((value, row) => (values[row * count + column] = value));
    });
    return { steps, ranks: this.rankList, values, attempts: steps.map((step) => this.attemptOf(step)) };
  }

  private row(step: number, attempt: number): StepRow | undefined {
    const known = this.rows.get(step);
    if (known && known.attempt > attempt) return undefined;
    this.learnNewest(step, attempt);
    if (known?.attempt === attempt) return known;
    const row: StepRow = { attempt, durationS: Number.NaN, metrics: new Map() };
    if (!known) this.order.splice(position(this.order, step), 0, step);
    this.rows.set(step, row);
    return row;
  }

  private learnNewest(step: number, attempt: number): void {
    const { last } = this;
    if (!last || attempt > last.attempt || (attempt === last.attempt && step > last.step))
      this.last = { attempt, step };
  }

  private cells(row: StepRow, metric: string): Float32Array {
    const known = row.metrics.get(metric);
    if (known) return known;
    const cells = new Float32Array(this.rankList.length).fill(Number.NaN);
    row.metrics.set(metric, cells);
    return cells;
  }

  private learnRanks(ranks: readonly number[]): void {
    const fresh = ranks.filter((rank) => !this.rowOfRank.has(rank));
    if (fresh.length === 0) return;
    const before = this.rankList;
    this.rankList = [...before, ...fresh].sort((left, right) => left - right);
    this.rowOfRank = new Map(this.rankList.map((rank, row) => [rank, row]));
    for (const row of this.rows.values()) {
      for (const [metric, old] of row.metrics) row.metrics.set(metric, this.moved(old, before));
    }
  }

  private moved(old: Float32Array, before: readonly number[]): Float32Array {
    const cells = new Float32Array(this.rankList.length).fill(Number.NaN);
    old.forEach((value, row) => (cells[this.rowOfRank.get(before[row] ?? -1) ?? 0] = value));
    return cells;
  }

  private trim(): void {
    const attempts = this.order.map((step) => this.attemptOf(step) ?? 0);
    const gone = oldest(attempts, this.capacity);
    if (gone.size === 0) return;
    for (const index of gone) this.rows.delete(this.order[index] ?? -1);
    this.order = this.order.filter((step) => this.rows.has(step));
  }
}
