/** Draws layers by captured steps. */
import type { Captures } from "../../../api/types";
import { magnitudeMap, type ColourMap, type ThemeName } from "../../../render/colour";
import { signedMap } from "../../../render/maps";
import type { Palette } from "../../../render/palette";
import type { Surface } from "../../../render/surface";
import { AXIS, frameOf, labelStride, rowHeight } from "../trackLayout";
import { layerText } from "./layersText";

export interface LayersPicture {
  readonly captures: Captures;
  readonly map: ColourMap;
  readonly palette: Palette;
  readonly selected: { readonly row: number; readonly column: number } | null;
}

const unit = (value: number): number => Math.min(1, Math.max(0, value));

/** Magnitudes on a logarithmic scale; 0 has the lowest colour. */
export function logMap(low: number, high: number): ColourMap {
  const { table } = magnitudeMap(0, 1);
  const size = Math.log(high / low) || 1;
  return {
    position: (value) => (value > 0 ? unit(Math.log(value / low) / size) : 0),
    table,
    marks: [low, high],
  };
}

/** The map of a quantity over the values that are shown. */
export function mapOf({ quantity, values }: Captures, theme: ThemeName): ColourMap {
  const found = values.flat().filter((value): value is number => value !== null);
  const high = found.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  if (quantity === "mean") return signedMap(theme, high || 1);
  if (quantity === "zeros" || quantity === "notFinite") return magnitudeMap(0, high || 1);
  const low = found.reduce((least, value) => (value > 0 ? Math.min(least, value) : least), high || 1);
  return logMap(low, high > low ? high : low * 2);
}

export const pictureHeight = (layers: number): number => rowHeight(layers) * layers + AXIS;

/** The cell under a point. */
export function cellAt(
  captures: Captures,
  width: number,
  x: number,
  y: number,
): { readonly row: number; readonly column: number } | null {
  const frame = frameOf(width);
  const column = Math.floor(((x - frame.left) / (frame.right - frame.left)) * captures.steps.length);
  const row = Math.floor(y / rowHeight(captures.layers.length));
  const within = row >= 0 && row < captures.layers.length && column >= 0 && column < captures.steps.length;
  return within ? { row, column } : null;
}

export function drawLayers(surface: Surface, { captures, map, palette, selected }: LayersPicture): void {
  const [rows, columns] = [captures.layers.length, captures.steps.length];
  const frame = frameOf(surface.width);
  const [row, column] = [rowHeight(rows), (frame.right - frame.left) / Math.max(1, columns)];
  const box = { x: frame.left, y: 0, width: frame.right - frame.left, height: row * rows };
  surface.hatch(box, palette.missing);
  const values = captures.values.flat().map((value) => value ?? Number.NaN);
  surface.image(Float32Array.from(values), columns, rows, map, box);
  const cell = (at: number, of: number) => ({
    x: frame.left + of * column,
    y: at * row,
    width: column,
    height: row,
  });
  captures.notFinite.forEach((counts, at) =>
    counts.forEach((count, of) => {
      if (count > 0) surface.hatch(cell(at, of), palette.alarm);
    }),
  );
  if (selected) surface.outline(cell(selected.row, selected.column), palette.text, 2);
  const stride = labelStride(row);
  captures.layers.forEach((layer, at) => {
    if (at % stride !== 0) return;
    const y = at * row + row / 2;
    surface.text(layerText(captures.site, layer), frame.left - 8, y, {
      colour: palette.muted,
      align: "right",
    });
  });
  drawSteps(surface, captures, palette, column, row * rows);
}

function drawSteps(
  surface: Surface,
  captures: Captures,
  palette: Palette,
  column: number,
  top: number,
): void {
  const frame = frameOf(surface.width);
  const every = Math.max(1, Math.ceil(80 / column));
  captures.steps.forEach(({ step }, at) => {
    if (at % every !== 0) return;
    const x = surface.snap(frame.left + (at + 0.5) * column);
    surface.rect({ x, y: top, width: 1, height: 4 }, palette.border);
    surface.text(step.toLocaleString("en"), x, top + 13, {
      colour: palette.muted,
      align: x > frame.right - 16 ? "right" : "center",
    });
  });
  surface.text("step", frame.left - 8, top + 13, { colour: palette.muted, align: "right" });
}
