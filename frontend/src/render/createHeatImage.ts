/** Choice of what draws a heat map. */
import { CanvasHeat } from "./heatCanvas2d";
import { GlHeat, glIsFast } from "./heatGl";
import type { HeatImage } from "./heatImage";

export const RENDERER_KEY = "megatronapp-renderer";

/** WebGL2 where a graphics card draws it; Canvas2D where software would. A browser's storage may choose. */
export function createHeatImage(): HeatImage {
  const chosen = localStorage.getItem(RENDERER_KEY);
  if (chosen !== "canvas2d" && (chosen === "webgl2" || glIsFast())) {
    const image = GlHeat.create();
    if (image) return image;
  }
  return new CanvasHeat();
}
