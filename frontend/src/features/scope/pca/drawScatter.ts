/** Draws tokens as points in a plane, one path for each prompt. */
import type { ThemeName } from "../../../render/colour";
import type { Palette } from "../../../render/palette";
import type { Surface } from "../../../render/surface";
import { tickStep, ticks } from "../../../render/ticks";
import { linear, type Scale, type Span } from "../../../render/viewport";
import type { Point } from "../../../scope/views/pcaPoints";
import { SHAPES } from "./markers";

/** Eight colours that people with a colour vision deficiency can distinguish. */
export const SERIES: Readonly<Record<ThemeName, readonly string[]>> = {
  dark: ["#6ea8fe", "#e3b341", "#4cc2a0", "#f47c9c", "#b79bff", "#9fd356", "#ff9152", "#9aa7b8"],
  light: ["#1b5fd1", "#9a6a00", "#0a7a5a", "#b3265a", "#6b46c8", "#4d7300", "#c24409", "#566274"],
};

export interface ScatterPicture {
  readonly points: readonly Point[];
  readonly axes: readonly [number, number];
  readonly ranges: readonly [Span, Span];
  readonly selected: { readonly sample: number; readonly position: number };
  readonly hovered: Point | null;
  readonly label: (point: Point) => string;
  /** Whether lines lead from each token to the next one. */
  readonly paths: boolean;
  readonly palette: Palette;
  readonly theme: ThemeName;
}

const LEFT = 48;
const BOTTOM = 34;
const MARGIN = 10;
const REACH_PX = 14;
const MOST_LABELS = 60;
const LABEL_PX = { width: 40, height: 13 };
const paths = SHAPES.map((shape) => (typeof Path2D === "undefined" ? null : new Path2D(shape)));

export interface ScatterScales {
  readonly x: Scale;
  readonly y: Scale;
}

export const scatterScales = (
  { ranges }: Pick<ScatterPicture, "ranges">,
  width: number,
  height: number,
): ScatterScales => ({
  x: linear(ranges[0], LEFT, width - MARGIN),
  y: linear(ranges[1], height - BOTTOM, MARGIN),
});

const placeOf = (
  { coordinates }: Point,
  axes: readonly [number, number],
  { x, y }: ScatterScales,
): [number, number] => [x.toPixel(coordinates[axes[0]] ?? 0), y.toPixel(coordinates[axes[1]] ?? 0)];

/** The point nearest to a pixel, if one is near. */
export function nearest(
  points: readonly Point[],
  { axes }: Pick<ScatterPicture, "axes">,
  scales: ScatterScales,
  x: number,
  y: number,
): Point | null {
  let [found, least]: [Point | null, number] = [null, REACH_PX];
  for (const point of points) {
    const [px, py] = placeOf(point, axes, scales);
    const distance = Math.hypot(px - x, py - y);
    if (distance < least) [found, least] = [point, distance];
  }
  return found;
}

export function drawScatter(surface: Surface, picture: ScatterPicture): void {
  const scales = scatterScales(picture, surface.width, surface.height);
  drawAxes(surface, picture, scales);
  for (const sample of new Set(picture.points.map((point) => point.sample)))
    drawPath(
      surface,
      picture,
      scales,
      sample,
      picture.points.filter((point) => point.sample === sample),
    );
  drawLabels(surface, picture, scales);
  for (const point of picture.points) {
    const selected = point.sample === picture.selected.sample && point.position === picture.selected.position;
    if (selected) drawRing(surface, picture, scales, point, picture.palette.text);
  }
  if (picture.hovered) drawRing(surface, picture, scales, picture.hovered, picture.palette.muted);
}

function drawAxes(
  surface: Surface,
  { ranges, axes, palette }: ScatterPicture,
  { x, y }: ScatterScales,
): void {
  const { grid, muted } = palette;
  const [bottom, right] = [surface.height - BOTTOM, surface.width - MARGIN];
  const digits = (span: Span): number =>
    Math.max(0, -Math.floor(Math.log10(tickStep(span.to - span.from, 6))));
  for (const value of ticks(ranges[0].from, ranges[0].to, 6)) {
    surface.rect({ x: surface.snap(x.toPixel(value)), y: MARGIN, width: 1, height: bottom - MARGIN }, grid);
    surface.text(value.toFixed(digits(ranges[0])), x.toPixel(value), bottom + 10, {
      colour: muted,
      align: "center",
    });
  }
  for (const value of ticks(ranges[1].from, ranges[1].to, 6)) {
    surface.rect({ x: LEFT, y: surface.snap(y.toPixel(value)), width: right - LEFT, height: 1 }, grid);
    surface.text(value.toFixed(digits(ranges[1])), LEFT - 6, y.toPixel(value), {
      colour: muted,
      align: "right",
    });
  }
  surface.text(`PC ${axes[0] + 1}`, right, bottom + 25, { colour: muted, align: "right", weight: 600 });
  surface.text(`PC ${axes[1] + 1}`, 2, MARGIN, { colour: muted, weight: 600 });
}

function drawPath(
  surface: Surface,
  picture: ScatterPicture,
  scales: ScatterScales,
  sample: number,
  points: readonly Point[],
): void {
  const colours = SERIES[picture.theme];
  const colour = colours[sample % colours.length] ?? picture.palette.text;
  const at = points.map((point) => placeOf(point, picture.axes, scales));
  surface.context.globalAlpha = sample === picture.selected.sample ? 0.5 : 0.22;
  if (picture.paths) surface.line(at, colour, 1);
  surface.context.globalAlpha = 1;
  const shape = paths[sample % paths.length];
  for (const [x, y] of at) {
    surface.context.save();
    surface.context.translate(x, y);
    surface.context.fillStyle = colour;
    if (shape) surface.context.fill(shape);
    surface.context.restore();
  }
}

/** Labels of tokens where there is space; tokens of the selected prompt are labelled first. */
function drawLabels(surface: Surface, picture: ScatterPicture, scales: ScatterScales): void {
  const taken: (readonly [number, number])[] = [];
  const order = picture.points.toSorted(
    (a, b) => Number(b.sample === picture.selected.sample) - Number(a.sample === picture.selected.sample),
  );
  for (const point of order) {
    if (taken.length >= MOST_LABELS) return;
    const [x, y] = placeOf(point, picture.axes, scales);
    const near = taken.some(
      ([tx, ty]) => Math.abs(tx - x) < LABEL_PX.width && Math.abs(ty - y) < LABEL_PX.height,
    );
    if (near || x > surface.width - 50) continue;
    taken.push([x, y]);
    surface.text(picture.label(point), x + 8, y, { colour: picture.palette.muted, maxWidth: 90 });
  }
}

function drawRing(
  surface: Surface,
  picture: ScatterPicture,
  scales: ScatterScales,
  point: Point,
  colour: string,
): void {
  const [x, y] = placeOf(point, picture.axes, scales);
  const { context } = surface;
  context.beginPath();
  context.arc(x, y, 8, 0, 2 * Math.PI);
  context.strokeStyle = colour;
  context.lineWidth = 2;
  context.stroke();
}
