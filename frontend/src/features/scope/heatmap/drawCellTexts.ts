/** Words in the cells of a heat map, where they have room; dark on light colours and light on dark ones. */
import { Mask } from "../../../render/cells";
import type { Surface } from "../../../render/surface";
import type { HeatPicture, Scales } from "./heatPicture";

const LEAST_PX = { width: 30, height: 13 };
const PADDING_PX = 3;
/** Perceived brightness of 0 .. 255 from which text is dark. */
const BRIGHT = 140;

export function inkOn(table: Uint8ClampedArray, code: number): string {
  const [red = 0, green = 0, blue = 0] = table.subarray(3 * code, 3 * code + 3);
  return 0.299 * red + 0.587 * green + 0.114 * blue > BRIGHT ? "#111" : "#fff";
}

export function drawCellTexts(surface: Surface, picture: HeatPicture, { x, y }: Scales): void {
  const { cells, cellText, map, rows, columns } = picture;
  const [width, height] = [x.toPixel(1) - x.toPixel(0), y.toPixel(1) - y.toPixel(0)];
  if (!cellText || width < LEAST_PX.width || height < LEAST_PX.height) return;
  const { row: top = 0, column: left = 0 } = picture.origin ?? {};
  for (let row = Math.floor(rows.from); row < rows.to; row += 1) {
    for (let column = Math.floor(columns.from); column < columns.to; column += 1) {
      const at = (row + top) * cells.columns + column + left;
      if (cells.mask[at] !== Mask.VALUE) continue;
      surface.text(cellText({ row, column }), x.toPixel(column) + PADDING_PX, y.toPixel(row + 0.5), {
        colour: inkOn(map.table, cells.values[at] ?? 0),
        align: "left",
        maxWidth: width - 2 * PADDING_PX,
      });
    }
  }
}
