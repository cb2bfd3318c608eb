/** Heat maps as images: codes through a table of 256 colours. Canvas2D and WebGL2 implement it. */
import type { Cells } from "./cells";
import type { Box } from "./surface";

export interface HeatImage {
  readonly kind: "canvas2d" | "webgl2";
  /** Take what changed; `table` has three bytes for each code. What is missing or NaN stays transparent. */
  sync(cells: Cells, table: Uint8ClampedArray): void;
  /** Draw the part `view` (in cells) into `box` (in pixels of `context`). */
  paint(context: CanvasRenderingContext2D, view: Box, box: Box): void;
  dispose(): void;
}
