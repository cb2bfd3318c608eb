/** Draws a matrix of cells with names of rows and columns. */
import type { ColourMap } from "../../../render/colour";
import type { Palette } from "../../../render/palette";
import type { Box, Surface } from "../../../render/surface";
import { AXIS, frameOf, labelStride, rowHeight } from "../trackLayout";
import type { Grid } from "./slowText";

/** Columns wider than this look like bars. */
const WIDEST = 72;

export interface MatrixPicture {
  readonly grid: Grid;
  readonly map: ColourMap;
  readonly palette: Palette;
  readonly axis: string;
  readonly selected: { readonly row: number; readonly column: number } | null;
  /** Cells with a frame: those that a verdict names. */
  readonly marked: (row: number, column: number) => boolean;
}

export const matrixHeight = (rows: number): number => rowHeight(rows) * rows + AXIS;

const columnWidth = (width: number, columns: number): number => {
  const frame = frameOf(width);
  return Math.min(WIDEST, (frame.right - frame.left) / Math.max(1, columns));
};

/** The cell under a point. */
export function matrixCell(
  { rows, columns }: Grid,
  width: number,
  x: number,
  y: number,
): { readonly row: number; readonly column: number } | null {
  const column = Math.floor((x - frameOf(width).left) / columnWidth(width, columns.length));
  const row = Math.floor(y / rowHeight(rows.length));
  const within = row >= 0 && row < rows.length && column >= 0 && column < columns.length;
  return within ? { row, column } : null;
}

export function drawMatrix(surface: Surface, picture: MatrixPicture): void {
  const { grid, map, palette, selected, marked } = picture;
  const { left } = frameOf(surface.width);
  const [row, column] = [rowHeight(grid.rows.length), columnWidth(surface.width, grid.columns.length)];
  const box = { x: left, y: 0, width: column * grid.columns.length, height: row * grid.rows.length };
  surface.hatch(box, palette.missing);
  const values = grid.values.flat().map((value) => value ?? Number.NaN);
  surface.image(Float32Array.from(values), grid.columns.length, grid.rows.length, map, box);
  if (row >= 12 && column >= 12) drawGaps(surface, box, row, column, palette.panel);
  const cell = (at: number, of: number): Box => ({
    x: left + of * column,
    y: at * row,
    width: column,
    height: row,
  });
  grid.values.forEach((line, at) =>
    line.forEach((_, of) => {
      if (marked(at, of)) surface.outline(cell(at, of), palette.alarm, 2);
    }),
  );
  if (selected) surface.outline(cell(selected.row, selected.column), palette.text, 2);
  drawNames(surface, picture, row, column, box.height);
}

function drawGaps(surface: Surface, box: Box, row: number, column: number, colour: string): void {
  for (let x = box.x + column; x < box.x + box.width - 1; x += column)
    surface.rect({ x: x - 0.5, y: 0, width: 1, height: box.height }, colour);
  for (let y = row; y < box.height - 1; y += row)
    surface.rect({ x: box.x, y: y - 0.5, width: box.width, height: 1 }, colour);
}

function drawNames(
  surface: Surface,
  { grid, palette, axis }: MatrixPicture,
  row: number,
  column: number,
  top: number,
): void {
  const { left } = frameOf(surface.width);
  const muted = { colour: palette.muted };
  const stride = labelStride(row);
  grid.rows.forEach((name, at) => {
    if (at % stride === 0)
      surface.text(name, left - 8, at * row + row / 2, { ...muted, align: "right", maxWidth: left - 10 });
  });
  const every = Math.max(1, Math.ceil(40 / column));
  grid.columns.forEach((name, of) => {
    if (of % every === 0)
      surface.text(name, left + (of + 0.5) * column, top + 13, { ...muted, align: "center" });
  });
  surface.text(axis, left - 8, top + 13, { ...muted, align: "right" });
}
