/** Draws ranks by steps. */
import type { Verdict } from "../../../api/types";
import type { ColourMap } from "../../../render/colour";
import type { Palette } from "../../../render/palette";
import { maxPool, maxPoolRows } from "../../../render/pool";
import type { Surface } from "../../../render/surface";
import { ticks } from "../../../render/ticks";
import type { Scale, Span } from "../../../render/viewport";
import type { Matrix } from "../../../store/stepStore";
import { isActive } from "../../../store/verdicts";
import { AXIS, drawMarks, frameOf, labelStride, rowHeight, type Marks } from "../trackLayout";

export interface HeatPicture {
  readonly matrix: Matrix;
  readonly map: ColourMap;
  readonly view: Span;
  readonly scale: Scale;
  readonly marks: Marks;
  readonly palette: Palette;
  readonly suspects: ReadonlySet<number>;
  readonly selectedRank: number | null;
}

export const heatHeight = (ranks: number): number => Math.round(rowHeight(ranks) * ranks) + AXIS;

export function drawHeat(surface: Surface, picture: HeatPicture): void {
  const { matrix, palette } = picture;
  const frame = frameOf(surface.width);
  const row = rowHeight(matrix.ranks.length);
  const height = row * matrix.ranks.length;
  surface.clipped({ x: frame.left, y: 0, width: frame.right - frame.left, height }, () => {
    drawCells(surface, picture, height);
    if (row >= 8) drawRowGaps(surface, matrix.ranks.length, row, palette);
    drawVerdicts(surface, picture, row);
    drawFaults(surface, picture, row);
    drawMarks(surface, picture.scale, picture.marks, palette, height);
  });
  drawLabels(surface, picture, row);
  drawAxis(surface, picture, height);
}

function drawCells(surface: Surface, { matrix, map, scale, palette }: HeatPicture, height: number): void {
  const { steps, ranks, values } = matrix;
  const [first, last] = [steps[0], steps.at(-1)];
  if (first === undefined || last === undefined) return;
  const x = scale.toPixel(first - 0.5);
  const box = { x, y: 0, width: scale.toPixel(last + 0.5) - x, height };
  surface.hatch(box, palette.missing);
  const columns = Math.max(1, Math.min(steps.length, Math.floor(box.width)));
  const rows = Math.max(1, Math.min(ranks.length, Math.floor(height)));
  const pooled = maxPoolRows(
    maxPool(values, steps.length, ranks.length, columns),
    columns,
    ranks.length,
    rows,
  );
  surface.image(pooled, columns, rows, map, box);
}

function drawRowGaps(surface: Surface, rows: number, row: number, palette: Palette): void {
  for (let index = 1; index < rows; index += 1) {
    surface.rect({ x: 0, y: index * row - 0.5, width: surface.width, height: 1 }, palette.panel);
  }
}

/** Steps of a verdict to frame: without those that the matrix has of another attempt. Both ends of a part belong to it. */
function framedParts({ since, until }: Verdict, { steps, attempts }: Matrix, end: number): Span[] {
  const to = until?.step ?? end;
  const parts: Span[] = [];
  let from: number | null = since.step;
  steps.forEach((step, column) => {
    if (step < since.step || step > to) return;
    const attempt = attempts[column];
    if (attempt === undefined || attempt === since.attempt) {
      from ??= step;
      return;
    }
    if (from !== null && from < step) parts.push({ from, to: step - 1 });
    from = null;
  });
  if (from !== null) parts.push({ from, to });
  return parts;
}

/** A frame around what a verdict names, from its first step on. */
function drawVerdicts(
  surface: Surface,
  { matrix, scale, marks, palette, view }: HeatPicture,
  row: number,
): void {
  for (const verdict of marks.verdicts) {
    const colour = isActive(verdict) ? palette.text : palette.muted;
    for (const { from, to } of framedParts(verdict, matrix, view.to + 1)) {
      const [x, end] = [scale.toPixel(from - 0.5), scale.toPixel(to + 0.5)];
      for (const rank of verdict.subject.ranks) {
        const index = matrix.ranks.indexOf(rank);
        if (index >= 0) surface.outline({ x, y: index * row, width: end - x, height: row }, colour, 2);
      }
    }
  }
}

/** Injected faults as hatched strips at the bottom of their rows, to compare with the verdict's frame. */
function drawFaults(surface: Surface, { matrix, scale, marks, palette }: HeatPicture, row: number): void {
  const thickness = Math.min(6, row / 3);
  for (const fault of marks.faults) {
    const index = matrix.ranks.indexOf(fault.rank);
    if (index < 0) continue;
    const x = scale.toPixel(fault.fromStep - 0.5);
    const width = scale.toPixel(fault.fromStep + fault.steps - 0.5) - x;
    const box = { x, y: (index + 1) * row - thickness - 1, width, height: thickness };
    surface.rect(box, palette.panel);
    surface.hatch(box, palette.text);
  }
}

function drawLabels(surface: Surface, picture: HeatPicture, row: number): void {
  const { matrix, palette, suspects, selectedRank } = picture;
  const stride = labelStride(row);
  matrix.ranks.forEach((rank, index) => {
    const [suspect, selected] = [suspects.has(rank), rank === selectedRank];
    const y = index * row + row / 2;
    if (selected) surface.rect({ x: 0, y: index * row, width: 3, height: row }, palette.accent);
    if (index % stride !== 0 && !suspect) return;
    const colour = suspect ? palette.alarm : selected ? palette.text : palette.muted;
    const text = suspect ? `▲ rank ${rank}` : `rank ${rank}`;
    surface.text(text, frameOf(surface.width).left - 8, y, {
      colour,
      weight: suspect || selected ? 650 : 400,
      align: "right",
    });
  });
}

function drawAxis(surface: Surface, { scale, view, palette }: HeatPicture, top: number): void {
  const frame = frameOf(surface.width);
  for (const step of ticks(view.from, view.to, Math.max(2, Math.floor((frame.right - frame.left) / 90)), 1)) {
    const x = surface.snap(scale.toPixel(step));
    surface.rect({ x, y: top, width: 1, height: 4 }, palette.border);
    const align = x > frame.right - 16 ? "right" : "center";
    surface.text(step.toLocaleString("en"), x, top + 13, { colour: palette.muted, align });
  }
  surface.text("step", frame.left - 8, top + 13, { colour: palette.muted, align: "right" });
}
