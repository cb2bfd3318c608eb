/** Labels of rows and columns of a heat map, as many as fit. */
import type { Palette } from "../../../render/palette";
import type { Box, Surface } from "../../../render/surface";
import type { Span } from "../../../render/viewport";
import type { HeatPicture, Mark, Scales } from "./heatPicture";

const LABEL_GAP = 14;

const selectedIn = (marks: readonly Mark[], axis: "row" | "column"): number | undefined =>
  marks.find((mark) => mark.kind === "selected" || mark.kind === axis)?.[axis];

/** Indices to label so that labels keep their distance; the selected one is always labelled, its neighbours may not be. */
function labelled(span: Span, each: number, spacing: number, selected: number | undefined): number[] {
  const stride = Math.max(1, Math.ceil(spacing / Math.max(each, 0.01)));
  const found: number[] = [];
  for (let index = Math.ceil(span.from / stride) * stride; index < span.to; index += stride) {
    if (selected === undefined || Math.abs(index - selected) * each >= spacing) found.push(index);
  }
  return selected !== undefined && selected >= span.from - 0.5 && selected < span.to
    ? [...found, selected]
    : found;
}

export function drawRowLabels(
  surface: Surface,
  picture: HeatPicture,
  frame: Box,
  { y }: Scales,
  palette: Palette,
): void {
  const { size, text } = picture.rowLabels;
  if (size === 0) return;
  const each = y.toPixel(1) - y.toPixel(0);
  const selected = selectedIn(picture.marks, "row");
  for (const row of labelled(picture.rows, each, LABEL_GAP, selected)) {
    const at = Math.min(Math.max(y.toPixel(row + 0.5), frame.y + 6), frame.y + frame.height - 6);
    const colour = row === selected ? palette.text : palette.muted;
    surface.text(text(row), frame.x - 7, at, {
      colour,
      align: "right",
      weight: row === selected ? 600 : 400,
      maxWidth: size - 9,
    });
  }
}

/** Labels are vertical where columns are narrow. */
export function drawColumnLabels(
  surface: Surface,
  picture: HeatPicture,
  { x }: Scales,
  palette: Palette,
): void {
  const { size, text } = picture.columnLabels;
  if (size === 0) return;
  const each = x.toPixel(1) - x.toPixel(0);
  const upright = size > 24;
  const selected = selectedIn(picture.marks, "column");
  for (const column of labelled(picture.columns, each, upright ? LABEL_GAP : 26, selected)) {
    const at = x.toPixel(column + 0.5);
    const style = {
      colour: column === selected ? palette.text : palette.muted,
      weight: column === selected ? 600 : 400,
    };
    if (!upright) surface.text(text(column), at, size / 2, { ...style, align: "center" });
    else drawUpright(surface, text(column), at, size, style);
  }
}

function drawUpright(
  surface: Surface,
  content: string,
  x: number,
  size: number,
  style: { colour: string; weight: number },
): void {
  const { context } = surface;
  context.save();
  context.translate(x, size - 6);
  context.rotate(-Math.PI / 2);
  surface.text(content, 0, 0, { ...style, maxWidth: size - 8 });
  context.restore();
}
