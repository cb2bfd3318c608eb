/**
 * The renderer of heat maps and the timeline (curves: lineChart.ts): a canvas in CSS pixels at the device's resolution.
 * It knows rectangles, lines, hatches, text and cell images, and nothing of jobs.
 */
import { tableIndex, type ColourMap } from "./colour";

export const FONT = '"Inter Variable", system-ui, sans-serif';

export interface Box {
  readonly x: number;
  readonly y: number;
  readonly width: number;
  readonly height: number;
}

export interface TextStyle {
  readonly colour: string;
  readonly size?: number;
  readonly weight?: number;
  readonly align?: CanvasTextAlign;
  /** Text wider than this is cut with an ellipsis, or left out where not even that fits. */
  readonly maxWidth?: number;
}

export class Surface {
  readonly context: CanvasRenderingContext2D;
  width = 0;
  height = 0;
  private ratio = 1;
  private cells: HTMLCanvasElement | undefined;
  private readonly hatches = new Map<string, CanvasPattern>();

  constructor(readonly canvas: HTMLCanvasElement) {
    const context = canvas.getContext("2d");
    if (!context) throw new Error("this browser gives no 2d canvas");
    this.context = context;
  }

  /** Start a frame of this size in CSS pixels; everything drawn before is cleared. */
  begin(width: number, height: number, ratio: number): void {
    const [deviceWidth, deviceHeight] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.canvas.width !== deviceWidth || this.canvas.height !== deviceHeight) {
      this.canvas.width = deviceWidth;
      this.canvas.height = deviceHeight;
    }
    [this.width, this.height, this.ratio] = [width, height, ratio];
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.clearRect(0, 0, width, height);
  }

  /** Position on the device's pixel grid, so that edges are sharp. */
  snap(value: number): number {
    return Math.round(value * this.ratio) / this.ratio;
  }

  rect({ x, y, width, height }: Box, fill: string): void {
    this.context.fillStyle = fill;
    this.context.fillRect(x, y, width, height);
  }

  outline({ x, y, width, height }: Box, colour: string, lineWidth = 1): void {
    const inset = lineWidth / 2;
    this.context.strokeStyle = colour;
    this.context.lineWidth = lineWidth;
    this.context.strokeRect(
      x + inset,
      y + inset,
      Math.max(width - lineWidth, 0.5),
      Math.max(height - lineWidth, 0.5),
    );
  }

  /** Diagonal stripes: missing data, waits and injected faults never differ by colour alone. */
  hatch({ x, y, width, height }: Box, colour: string): void {
    this.context.fillStyle = this.hatchPattern(colour);
    this.context.fillRect(x, y, width, height);
  }

  line(
    points: readonly (readonly [number, number])[],
    colour: string,
    lineWidth = 1,
    dash: number[] = [],
  ): void {
    const { context } = this;
    context.beginPath();
    for (const [x, y] of points) context.lineTo(x, y);
    context.strokeStyle = colour;
    context.lineWidth = lineWidth;
    context.lineJoin = "round";
    context.setLineDash(dash);
    context.stroke();
    context.setLineDash([]);
  }

  /** An arrow from one point to another, bent so that parallel ones stay apart. */
  arrow(
    from: readonly [number, number],
    to: readonly [number, number],
    colour: string,
    lineWidth = 1.5,
  ): void {
    const { context } = this;
    const bend = Math.max(12, Math.abs(to[0] - from[0]) / 2);
    context.beginPath();
    context.moveTo(...from);
    context.bezierCurveTo(from[0] + bend, from[1], to[0] - bend, to[1], to[0], to[1]);
    context.strokeStyle = colour;
    context.lineWidth = lineWidth;
    context.stroke();
    context.beginPath();
    context.moveTo(to[0], to[1]);
    context.lineTo(to[0] - 7, to[1] - 4);
    context.lineTo(to[0] - 7, to[1] + 4);
    context.closePath();
    context.fillStyle = colour;
    context.fill();
  }

  /** Vertically centred text; returns whether it was drawn. */
  text(content: string, x: number, y: number, style: TextStyle): boolean {
    const { context } = this;
    context.font = `${style.weight ?? 400} ${style.size ?? 11}px ${FONT}`;
    const shown = style.maxWidth === undefined ? content : this.fitted(content, style.maxWidth);
    if (shown === "") return false;
    context.textAlign = style.align ?? "left";
    context.textBaseline = "middle";
    context.fillStyle = style.colour;
    context.fillText(shown, x, y);
    return true;
  }

  /** Draw within `box` only. */
  clipped({ x, y, width, height }: Box, draw: () => void): void {
    this.context.save();
    this.context.beginPath();
    this.context.rect(x, y, width, height);
    this.context.clip();
    draw();
    this.context.restore();
  }

  /** A matrix [rows][columns] as cells filling `box`, one texel each; NaN stays transparent. */
  image(values: Float32Array, columns: number, rows: number, map: ColourMap, box: Box): void {
    if (columns === 0 || rows === 0) return;
    const cells = (this.cells ??= document.createElement("canvas"));
    [cells.width, cells.height] = [columns, rows];
    const context = cells.getContext("2d");
    if (!context) return;
    const pixels = context.createImageData(columns, rows);
    for (let index = 0; index < columns * rows; index += 1) {
      const value = values[index] ?? Number.NaN;
      if (!Number.isNaN(value)) paint(pixels.data, index * 4, map, value);
    }
    context.putImageData(pixels, 0, 0);
    this.context.imageSmoothingEnabled = false;
    this.context.drawImage(cells, box.x, box.y, box.width, box.height);
  }

  private fitted(content: string, maxWidth: number): string {
    if (this.context.measureText(content).width <= maxWidth) return content;
    const each = this.context.measureText("0").width || 6;
    const keep = Math.floor(maxWidth / each) - 1;
    return keep < 2 ? "" : `${content.slice(0, keep)}…`;
  }

  private hatchPattern(colour: string): CanvasPattern | string {
    const known = this.hatches.get(colour);
    if (known) return known;
    const pattern = hatchPattern(this.context, colour);
    if (!pattern) return colour;
    this.hatches.set(colour, pattern);
    return pattern;
  }
}

/** Diagonal stripes to fill with. */
export function hatchPattern(on: CanvasRenderingContext2D, colour: string): CanvasPattern | null {
  const tile = document.createElement("canvas");
  [tile.width, tile.height] = [6, 6];
  const context = tile.getContext("2d");
  if (!context) return null;
  context.strokeStyle = colour;
  context.lineWidth = 1.2;
  context.beginPath();
  for (const shift of [-6, 0, 6]) {
    context.moveTo(shift, 6);
    context.lineTo(shift + 6, 0);
  }
  context.stroke();
  return on.createPattern(tile, "repeat");
}

function paint(pixels: Uint8ClampedArray, at: number, map: ColourMap, value: number): void {
  const from = tableIndex(map, value);
  pixels[at] = map.table[from] ?? 0;
  pixels[at + 1] = map.table[from + 1] ?? 0;
  pixels[at + 2] = map.table[from + 2] ?? 0;
  pixels[at + 3] = 255;
}
