/** Draws one curve over steps. */
import type { Palette } from "../../../render/palette";
import type { Surface } from "../../../render/surface";
import { ticks } from "../../../render/ticks";
import { linear, type Scale, type Span } from "../../../render/viewport";
import { position } from "../../../store/seriesStore";
import { drawMarks, frameOf, type Marks } from "../trackLayout";

const PAD = 6;

export interface CurvePicture {
  readonly steps: readonly number[];
  readonly values: readonly number[];
  readonly view: Span;
  readonly scale: Scale;
  readonly marks: Marks;
  readonly palette: Palette;
  readonly colour: string;
  readonly format: (value: number, tickStep: number) => string;
}

interface Visible {
  readonly points: readonly (readonly [number, number])[];
  readonly low: number;
  readonly high: number;
}

/** Points in view and one beyond each side; of several points on one pixel the extremes are kept. */
export function visiblePoints({ steps, values, view, scale }: CurvePicture): Visible {
  const first = Math.max(0, position(steps, view.from) - 1);
  const last = Math.min(steps.length, position(steps, view.to) + 1);
  const points: (readonly [number, number])[] = [];
  let [low, high] = [Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY];
  for (let index = first; index < last; index += 1) {
    const value = values[index] ?? Number.NaN;
    if (!Number.isFinite(value)) continue;
    points.push([scale.toPixel(steps[index] ?? 0), value]);
    [low, high] = [Math.min(low, value), Math.max(high, value)];
  }
  return { points, low, high };
}

/** Range of the value axis: a tenth of room, and never empty. */
export function valueRange(low: number, high: number): Span {
  const size = high - low || Math.abs(high) || 1;
  return { from: low - size * 0.1, to: high + size * 0.1 };
}

export function drawCurve(surface: Surface, picture: CurvePicture): void {
  const { palette, colour } = picture;
  const { height } = surface;
  const frame = frameOf(surface.width);
  const { points, low, high } = visiblePoints(picture);
  if (points.length === 0) return;
  const range = valueRange(low, high);
  const vertical = linear(range, height - PAD, PAD);
  const marks = ticks(range.from, range.to, Math.max(2, Math.floor(height / 22)));
  const tickStep = (marks[1] ?? 1) - (marks[0] ?? 0);
  for (const mark of marks) {
    const y = surface.snap(vertical.toPixel(mark)) + 0.5;
    surface.rect({ x: frame.left, y, width: frame.right - frame.left, height: 1 }, palette.grid);
    surface.text(picture.format(mark, tickStep), frame.left - 8, y, {
      colour: palette.muted,
      align: "right",
    });
  }
  const box = { x: frame.left, y: 0, width: frame.right - frame.left, height };
  surface.clipped(box, () => {
    const line = points.map(([x, value]) => [x, vertical.toPixel(value)] as const);
    surface.line(line, colour, 1.75);
    const [only] = line;
    if (line.length === 1 && only) surface.dot(only[0], only[1], 2.5, colour);
    drawMarks(surface, picture.scale, picture.marks, palette, height);
  });
}
