/** Heat map of one number of each head: layers are rows, heads are columns. */
import type { ColourMap } from "../../../render/colour";
import type { Cells } from "../../../render/cells";
import type { Range } from "../../../scope/layout";
import type { HeatPicture, Place } from "./heatPicture";
import { areaOf } from "./rankMarks";

const LABELS = { row: 26, column: 18 };
const ROW_PX = { least: 11, most: 30, all: 300 };

/** Pixels that a picture of so many layers is high. */
export function headPictureHeight(layers: number): number {
  const row = Math.max(ROW_PX.least, Math.min(ROW_PX.most, Math.floor(ROW_PX.all / layers)));
  return row * layers + LABELS.column + 1;
}

/** Picture of all heads, with the selected one and those of the selected rank marked. */
export function headPicture(
  cells: Cells,
  map: ColourMap,
  model: { readonly layers: number; readonly heads: number },
  selected: Place,
  shard: { readonly layers: Range; readonly heads: Range } | null,
): HeatPicture {
  return {
    cells,
    group: 1,
    map,
    rows: { from: 0, to: model.layers },
    columns: { from: 0, to: model.heads },
    rowLabels: { text: String, size: LABELS.row },
    columnLabels: { text: String, size: LABELS.column },
    gaps: true,
    marks: [
      ...(shard ? [areaOf(shard.layers, shard.heads)] : []),
      { row: selected.row, column: selected.column, kind: "selected" },
    ],
  };
}
