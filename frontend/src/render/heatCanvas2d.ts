/** Heat maps on Canvas2D. */
import type { Cells, Region } from "./cells";
import { Mask } from "./cells";
import type { HeatImage } from "./heatImage";
import type { Box } from "./surface";

/** The table as pixels in the order of the bytes of an image. */
function packed(table: Uint8ClampedArray): Uint32Array {
  const out = new Uint32Array(256);
  const bytes = new Uint8Array(out.buffer);
  for (let code = 0; code < 256; code += 1) {
    bytes.set(table.subarray(code * 3, code * 3 + 3), code * 4);
    bytes[code * 4 + 3] = 255;
  }
  return out;
}

export class CanvasHeat implements HeatImage {
  readonly kind = "canvas2d";
  private readonly canvas = document.createElement("canvas");
  private readonly context = this.canvas.getContext("2d");
  private image: ImageData | undefined;
  private table: Uint8ClampedArray | undefined;
  private colours: Uint32Array = new Uint32Array(256);

  sync(cells: Cells, table: Uint8ClampedArray): void {
    const changed = cells.takeDirty();
    const whole = { column: 0, row: 0, columns: cells.columns, rows: cells.rows };
    if (cells.columns === 0 || cells.rows === 0) return;
    const resized = this.image?.width !== cells.columns || this.image.height !== cells.rows;
    if (resized) {
      [this.canvas.width, this.canvas.height] = [cells.columns, cells.rows];
      this.image = this.context?.createImageData(cells.columns, cells.rows);
    }
    const recoloured = this.table !== table;
    if (recoloured) [this.table, this.colours] = [table, packed(table)];
    const region = resized || recoloured ? whole : changed;
    if (region) this.colour(cells, region);
  }

  paint(context: CanvasRenderingContext2D, view: Box, box: Box): void {
    if (!this.image) return;
    context.imageSmoothingEnabled = false;
    context.drawImage(
      this.canvas,
      view.x,
      view.y,
      view.width,
      view.height,
      box.x,
      box.y,
      box.width,
      box.height,
    );
  }

  dispose(): void {
    this.canvas.width = this.canvas.height = 0;
    this.image = undefined;
  }

  private colour(cells: Cells, { column, row, columns, rows }: Region): void {
    if (!this.image) return;
    const pixels = new Uint32Array(this.image.data.buffer);
    const { colours } = this;
    const { mask, values, columns: width } = cells;
    const [end, bottom] = [Math.min(width, column + columns), Math.min(cells.rows, row + rows)];
    for (let y = row; y < bottom; y += 1) {
      for (let at = y * width + column, to = y * width + end; at < to; at += 1)
        pixels[at] = mask[at] === Mask.VALUE ? (colours[values[at] as number] as number) : 0;
    }
    this.context?.putImageData(this.image, 0, 0, column, row, columns, rows);
  }
}
