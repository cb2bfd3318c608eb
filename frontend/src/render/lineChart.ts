/** Curves over one axis, drawn by uPlot. Pointer and keys are the caller's: the axis is shared with other pictures. */
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import type { Palette } from "./palette";
import { FONT } from "./surface";
import { ticks } from "./ticks";
import type { Span } from "./viewport";

export interface Line {
  /** NaN where there is none: the line has a gap, unless `spans`. */
  readonly values: ArrayLike<number>;
  readonly colour: keyof Palette;
  readonly width: number;
  readonly dash?: readonly number[];
  /** Draws points where they have space. */
  readonly dots?: boolean;
  readonly spans?: boolean;
}

/** A vertical line over the curves. */
export interface Rule {
  readonly at: number;
  readonly colour: keyof Palette;
  readonly width: number;
  readonly dash?: readonly number[];
}

/** CSS pixels around the curves; labels are in `left`, and in `bottom` where it has space for them. */
export interface Margins {
  readonly left: number;
  readonly right: number;
  readonly top: number;
  readonly bottom: number;
}

export interface Size {
  readonly width: number;
  readonly height: number;
}

export interface LineChartData {
  /** Ascending. */
  readonly x: readonly number[];
  readonly lines: readonly Line[];
  readonly view: Span;
  readonly rules: readonly Rule[];
  readonly palette: Palette;
}

/** What never changes in the life of a chart. */
export interface LineChartStyle {
  readonly margins: Margins;
  readonly range: (low: number, high: number) => Span;
  readonly format: (value: number, tickStep: number) => string;
}

const DOT_PX = 4;
const TICK_PX = 22;
const LABEL_PX = 16;

const columns = ({ x, lines }: LineChartData): uPlot.AlignedData => [
  [...x],
  ...lines.map(({ values }) =>
    Array.from(values, (value) => (Number.isFinite(value) ? value : null)).slice(0, x.length),
  ),
];

/** Indices of values without a neighbour, which no line shows. */
function isolated({ data, series }: uPlot, line: number): number[] {
  const values = data[line] ?? [];
  const [first, last] = series[0]?.idxs ?? [0, -1];
  const isGap = (index: number): boolean => typeof values[index] !== "number";
  const indices: number[] = [];
  for (let index = first; index <= last; index += 1)
    if (!isGap(index) && isGap(index - 1) && isGap(index + 1)) indices.push(index);
  return indices;
}

export class LineChart {
  private readonly plot: uPlot;

  constructor(
    box: HTMLElement,
    size: Size,
    private data: LineChartData,
    private readonly style: LineChartStyle,
  ) {
    this.plot = new uPlot({ ...size, ...this.options() }, columns(data), box);
  }

  setData(data: LineChartData): void {
    this.data = data;
    this.plot.batch(() => {
      this.plot.setData(columns(data), false);
      this.setView(data);
    });
  }

  /** Draw another part of curves that are the same. */
  setView(data: LineChartData): void {
    this.data = data;
    this.plot.setScale("x", { min: data.view.from, max: data.view.to });
  }

  /** Draw other rules or colours over curves that are the same. */
  repaint(data: LineChartData): void {
    this.data = data;
    this.plot.redraw(false);
  }

  setSize(size: Size): void {
    this.plot.setSize(size);
  }

  /** What is drawn is old until the next change: see `data-drawn` in useCanvas.ts. */
  expire(): void {
    delete this.plot.ctx.canvas.dataset["drawn"];
  }

  destroy(): void {
    this.plot.destroy();
  }

  private options(): Omit<uPlot.Options, "width" | "height"> {
    const { margins, range } = this.style;
    const { view, lines } = this.data;
    const bottom = margins.bottom >= LABEL_PX ? 0 : margins.bottom;
    return {
      padding: [margins.top, margins.right, bottom, 0],
      legend: { show: false },
      cursor: { show: false },
      scales: {
        x: { time: false, auto: false, min: view.from, max: view.to, range: (_, min, max) => [min, max] },
        y: {
          range: (_, low, high) => {
            const { from, to } = Number.isFinite(low) ? range(low, high) : { from: 0, to: 1 };
            return [from, to];
          },
        },
      },
      axes: this.axes(),
      series: [{}, ...lines.map((line, index) => this.series(line, index))],
      hooks: { draw: [(plot) => this.drawRules(plot), (plot) => this.named(plot)] },
    };
  }

  private axes(): uPlot.Axis[] {
    const { margins, format } = this.style;
    const common = {
      stroke: () => this.data.palette.muted,
      font: `11px ${FONT}`,
      ticks: { show: false },
      space: 1,
    };
    return [
      {
        ...common,
        show: margins.bottom >= LABEL_PX,
        size: margins.bottom,
        gap: 4,
        grid: { show: false },
        splits: (_, __, min, max) => ticks(min, max, 6, 1),
        values: (_, splits) => splits.map(String),
      },
      {
        ...common,
        size: margins.left,
        gap: 8,
        grid: { stroke: () => this.data.palette.grid, width: 1 },
        splits: ({ height }, _, min, max) =>
          ticks(min, max, Math.min(4, Math.max(2, Math.floor(height / TICK_PX)))),
        values: (_, splits) => splits.map((value) => format(value, (splits[1] ?? 1) - (splits[0] ?? 0))),
      },
    ];
  }

  private series({ width, dash, dots, spans }: Line, index: number): uPlot.Series {
    const colour = (): string => this.data.palette[this.data.lines[index]?.colour ?? "text"];
    return {
      stroke: colour,
      width,
      dash: [...(dash ?? [])],
      spanGaps: spans ?? false,
      pxAlign: 0,
      points: {
        size: DOT_PX,
        space: DOT_PX * 2,
        stroke: colour,
        fill: colour,
        ...(dots ? {} : { show: false }),
        filter: (plot, line, show) => (show ? null : isolated(plot, line)),
      },
    };
  }

  /** Name what is drawn, once there is room for it. */
  private named({ ctx, bbox }: uPlot): void {
    const { from, to } = this.data.view;
    if (bbox.width > 0) ctx.canvas.dataset["drawn"] = `${from} to ${to}`;
  }

  private drawRules({ ctx, bbox, valToPos }: uPlot): void {
    const { rules, view, palette } = this.data;
    ctx.save();
    for (const { at, colour, width, dash } of rules) {
      if (at < view.from || at > view.to) continue;
      const x = Math.round(valToPos(at, "x", true));
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.strokeStyle = palette[colour];
      ctx.lineWidth = width * uPlot.pxRatio;
      ctx.setLineDash((dash ?? []).map((length) => length * uPlot.pxRatio));
      ctx.stroke();
    }
    ctx.restore();
  }
}
