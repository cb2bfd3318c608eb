import { describe, expect, it } from "vitest";
import type { Verdict } from "../../../api/types";
import { magnitudeMap } from "../../../render/colour";
import { PALETTES } from "../../../render/palette";
import type { Box, Surface } from "../../../render/surface";
import { linear } from "../../../render/viewport";
import { StepStore } from "../../../store/stepStore";
import { drawHeat } from "./drawHeat";

/** First and last step of the frames around rank 0, where attempt 0 ended with step 15 and attempt 1 did steps 8 to 11. */
function framed(attempt: number, since: number, until: number | null, view = { from: 0, to: 20 }) {
  const store = new StepStore();
  const add = (of: number, first: number, last: number): void => {
    const steps = Array.from({ length: last - first + 1 }, (_, index) => first + index);
    store.addHeatmap({
      metric: "compute",
      attempts: steps.map(() => of),
      steps,
      ranks: [0],
      values: [steps.map(() => 1)],
    });
  };
  add(0, 1, 15);
  add(1, 8, 11);
  const moment = (step: number) => ({ attempt, step, time: 0 });
  const verdict = {
    state: "confirmed",
    subject: { type: "rank", ranks: [0] },
    since: moment(since),
    until: until === null ? null : moment(until),
  } as unknown as Verdict;
  const scale = linear(view, 66, 588);
  const frames: number[][] = [];
  const nothing = (): void => undefined;
  const surface = {
    width: 600,
    snap: (value: number) => value,
    clipped: (_: unknown, draw: () => void) => draw(),
    outline: ({ x, width }: Box) =>
      frames.push([scale.toValue(x) + 0.5, scale.toValue(x + width) - 0.5].map(Math.round)),
    rect: nothing,
    text: nothing,
    hatch: nothing,
    image: nothing,
  };
  drawHeat(surface as unknown as Surface, {
    matrix: store.matrix("compute", Math.ceil(view.from), Math.floor(view.to)),
    map: magnitudeMap(0, 1),
    view,
    scale,
    marks: { selected: null, hovered: null, verdicts: [verdict], faults: [] },
    palette: PALETTES.dark,
    suspects: new Set(),
    selectedRank: null,
  });
  return frames;
}

describe("frames of verdicts in the heat map", () => {
  it("are around steps of the verdict's attempt alone", () => {
    expect(framed(0, 3, 5)).toEqual([[3, 5]]);
    expect(framed(0, 3, 10)).toEqual([[3, 7]]);
    expect(framed(0, 9, 11)).toEqual([]);
    expect(framed(0, 10, 14)).toEqual([[12, 14]]);
    expect(framed(0, 5, null)).toEqual([
      [5, 7],
      [12, 21],
    ]);
    expect(framed(1, 9, 10)).toEqual([[9, 10]]);
  });

  it("begin outside of the view where the verdict does", () => {
    expect(framed(0, 1, 7, { from: 4, to: 20 })).toEqual([[1, 7]]);
  });
});
