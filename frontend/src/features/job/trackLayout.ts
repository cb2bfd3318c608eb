/** Geometry shared by the tracks over steps, so that they line up. CSS pixels. */
import type { Fault, Verdict } from "../../api/types";
import type { Frame } from "../../composables/useViewport";
import type { Palette } from "../../render/palette";
import type { Surface } from "../../render/surface";
import type { Scale, Span } from "../../render/viewport";

export const GUTTER = 66;
export const MARGIN = 12;
export const AXIS = 22;
const HEAT_HEIGHT = 420;

export const frameOf = (width: number): Frame => ({
  left: GUTTER,
  right: Math.max(width - MARGIN, GUTTER + 1),
});

/** Height of one rank's row in the heat map: readable where there is room, a fraction of a pixel where there are many. */
export const rowHeight = (ranks: number): number =>
  ranks > HEAT_HEIGHT / 4 ? HEAT_HEIGHT / ranks : Math.min(28, Math.floor(HEAT_HEIGHT / Math.max(ranks, 1)));

/** Every how many rows a label fits. */
export const labelStride = (height: number): number => Math.max(1, Math.ceil(14 / height));

/** Steps that have a column in `view`; step s covers s - 0.5 to s + 0.5. */
export function stepsIn(view: Span): { readonly first: number; readonly last: number } {
  return { first: Math.max(0, Math.floor(view.from + 0.5)), last: Math.max(0, Math.ceil(view.to - 0.5)) };
}

/** The step under a pixel. */
export const stepAt = (scale: Scale, pixel: number): number => Math.max(0, Math.round(scale.toValue(pixel)));

export interface Marks {
  readonly selected: number | null;
  readonly hovered: number | null;
  readonly verdicts: readonly Verdict[];
  readonly faults: readonly Fault[];
}

/** Vertical lines of the selected and the hovered step, over the whole height of a track. */
export function drawMarks(
  surface: Surface,
  scale: Scale,
  marks: Marks,
  palette: Palette,
  height: number,
): void {
  const line = (step: number, colour: string, width: number, dash: number[]): void => {
    const x = surface.snap(scale.toPixel(step));
    surface.line(
      [
        [x, 0],
        [x, height],
      ],
      colour,
      width,
      dash,
    );
  };
  if (marks.hovered !== null) line(marks.hovered, palette.muted, 1, [2, 3]);
  if (marks.selected !== null) line(marks.selected, palette.accent, 1.5, []);
}
