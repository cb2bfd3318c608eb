/** What a heat map shows: cells in a frame, labels at their edges, marks on them. */
import type { Cell, PointerPosition } from "../../../composables/useCellCursor";
import type { ColourMap } from "../../../render/colour";
import type { Cells } from "../../../render/cells";
import type { Box } from "../../../render/surface";
import { linear, type Scale, type Span } from "../../../render/viewport";

/** A place in units of the picture: a cell, or a group of cells (the picture of a head). */
export type Place = Cell;
export type PointedPlace = Place & PointerPosition;

export type MarkKind = "selected" | "cursor" | "pinned" | "row" | "column" | "area";

export interface Mark extends Place {
  readonly kind: MarkKind;
  readonly rows?: number;
  readonly columns?: number;
}

export interface Labels {
  /** Label of a row or column; empty: none. */
  readonly text: (index: number) => string;
  /** Pixels that they take. */
  readonly size: number;
}

export interface HeatPicture {
  readonly cells: Cells;
  /** Cells along the edge of a place. */
  readonly group: number;
  /** Cell at which place (0, 0) begins; default (0, 0). */
  readonly origin?: Place;
  readonly map: ColourMap;
  /** Windows in units of places. */
  readonly rows: Span;
  readonly columns: Span;
  readonly rowLabels: Labels;
  readonly columnLabels: Labels;
  readonly marks: readonly Mark[];
  readonly gaps: boolean;
  /** Text in a cell, shown where cells are wide enough. */
  readonly cellText?: (place: Place) => string;
}

/** Box of the cells, in pixels of the canvas. */
export function frameOf(
  picture: Pick<HeatPicture, "rowLabels" | "columnLabels">,
  width: number,
  height: number,
): Box {
  const { size: left } = picture.rowLabels;
  const { size: top } = picture.columnLabels;
  return { x: left, y: top, width: Math.max(1, width - left - 1), height: Math.max(1, height - top - 1) };
}

export interface Scales {
  readonly x: Scale;
  readonly y: Scale;
}

export const scalesOf = (picture: Pick<HeatPicture, "rows" | "columns">, frame: Box): Scales => ({
  x: linear(picture.columns, frame.x, frame.x + frame.width),
  y: linear(picture.rows, frame.y, frame.y + frame.height),
});

/** Place under a pixel; null outside of the cells. */
export function placeAt(picture: HeatPicture, frame: Box, x: number, y: number): Place | null {
  const scales = scalesOf(picture, frame);
  const [column, row] = [Math.floor(scales.x.toValue(x)), Math.floor(scales.y.toValue(y))];
  const inside = x >= frame.x && y >= frame.y && x < frame.x + frame.width && y < frame.y + frame.height;
  return inside && row >= 0 && column >= 0 && row < picture.rows.to && column < picture.columns.to
    ? { row, column }
    : null;
}
