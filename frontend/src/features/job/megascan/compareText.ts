/** Two windows of steps next to each other. Pure. */
import type { RankView, Verdict } from "../../../api/types";
import { ABSENT, ratio, seconds } from "../../../store/format";
import type { Slowdowns, StepRange } from "./megascanApi";
import { cellName } from "./slowText";

export const COMPARED_STEPS = 16;
/** Cells in the table at most: those that changed most. */
export const MOST_CHANGED = 12;

/** The steps before the first finding of the attempt that is shown; without one the oldest of those that are shown. */
export function usualBefore(view: Slowdowns, verdicts: readonly Verdict[]): StepRange {
  const since = verdicts.flatMap(({ since: { attempt, step } }) => (attempt === view.attempt ? [step] : []));
  const end = since.length > 0 ? Math.min(...since) : (view.steps[0] ?? 0);
  return { from: Math.max(0, end - COMPARED_STEPS), to: Math.max(0, end - 1) };
}

export const rangeText = ({ steps }: Slowdowns): string =>
  steps.length === 0 ? ABSENT : `steps ${steps[0]} to ${steps.at(-1)}`;

const mean = (values: readonly number[]): number | null =>
  values.length === 0 ? null : values.reduce((sum, value) => sum + value, 0) / values.length;

/** A ratio as a change: +50 %, -3 %. */
export function changeText(before: number | null, after: number | null): string {
  if (before === null || after === null || before <= 0) return ABSENT;
  const change = Math.round((after / before - 1) * 100);
  return `${change > 0 ? "+" : ""}${change} %`;
}

type Row = readonly [name: string, before: string, after: string, change: string];

/** Length of a step, with and without what was slow, then the cells that changed most. */
export function comparedRows(before: Slowdowns, after: Slowdowns, ranks: readonly RankView[]): Row[] {
  const lengths = (name: string, of: (view: Slowdowns) => readonly number[]): Row => {
    const [was, is] = [mean(of(before)), mean(of(after))];
    return [name, seconds(was), seconds(is), changeText(was, is)];
  };
  const known = new Map(before.cells.map((cell) => [`${cell.stage} ${cell.replica}`, cell.slowdown]));
  const cells = after.cells.map((cell) => {
    const was = known.get(`${cell.stage} ${cell.replica}`) ?? null;
    const size = Math.abs(Math.log((cell.slowdown ?? 1) / (was ?? 1)));
    const row: Row = [
      cellName(cell, ranks),
      ratio(was),
      ratio(cell.slowdown),
      changeText(was, cell.slowdown),
    ];
    return { size, row };
  });
  return [
    lengths("Step", (view) => view.recordedSeconds),
    lengths("Step if nothing were slow", (view) => view.idealSeconds),
    [
      "Slowdown of the job",
      ratio(before.slowdown),
      ratio(after.slowdown),
      changeText(before.slowdown, after.slowdown),
    ],
    ...cells
      .sort((left, right) => right.size - left.size)
      .slice(0, MOST_CHANGED)
      .map(({ row }) => row),
  ];
}
