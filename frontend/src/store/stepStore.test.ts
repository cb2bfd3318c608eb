import { describe, expect, it } from "vitest";
import type { Heatmap } from "../api/types";
import { StepStore } from "./stepStore";
import { durations } from "./stepViews";
import { header } from "./testSteps";

const heatmap = (change: Partial<Heatmap> = {}): Heatmap => ({
  metric: "compute",
  attempts: [0, 0],
  steps: [4, 5],
  ranks: [0, 1],
  values: [
    [0.1, 0.2],
    [0.3, null],
  ],
  ...change,
});

describe("StepStore", () => {
  it("joins history and live frames into one matrix with a column for every step", () => {
    const store = new StepStore();
    store.addHeatmap(heatmap());
    store.addFrame(header({ steps: [7] }), new Float32Array([0.5, 0.6, 0.7, 0.8]));
    const { steps, ranks, values } = store.matrix("compute", 4, 7);
    expect(steps).toEqual([4, 5, 6, 7]);
    expect(ranks).toEqual([0, 1]);
    const missing = Number.NaN;
    expect([...values].map((value) => +value.toFixed(3))).toEqual([
      0.1,
      0.2,
      missing,
      0.5,
      0.3,
      missing,
      missing,
      0.6,
    ]);
    expect(store.value("wait", 1, 7)).toBeCloseTo(0.8);
    expect(store.durationOf(7)).toBe(0.25);
    expect(store.value("compute", 1, 5)).toBeUndefined();
  });

  it("lets a newer attempt replace a step and refuses an older one", () => {
    const store = new StepStore();
    store.addSteps([{ attempt: 1, step: 4, startNs: 0, durationNs: 1e9, complete: true }]);
    store.addHeatmap(heatmap());
    expect(store.value("compute", 0, 4)).toBeUndefined();
    expect(store.value("compute", 0, 5)).toBeCloseTo(0.2);
    store.addFrame(header({ attempt: 2, steps: [5], metrics: ["compute"] }), new Float32Array([9, 8]));
    expect(store.value("compute", 0, 5)).toBe(9);
    expect(store.attemptOf(5)).toBe(2);
  });

  it("has the newest step of the newest attempt, which may begin below the last step of the one before", () => {
    const store = new StepStore();
    expect(store.newest).toBeNull();
    const add = (attempt: number, ...steps: number[]): void =>
      store.addSteps(steps.map((step) => ({ attempt, step, startNs: 0, durationNs: 1e9, complete: true })));
    add(0, 99, 100, 150, 149);
    expect(store.newest).toBe(150);
    add(1, 100, 102, 101);
    expect(store.newest).toBe(102);
    add(0, 151);
    expect(store.newest).toBe(102);
    expect(store.matrix("compute", 98, 101).attempts).toEqual([undefined, 0, 1, 1]);
  });

  it("makes room for ranks that come up later", () => {
    const store = new StepStore();
    store.addHeatmap(heatmap({ ranks: [1, 3] }));
    store.addFrame(header({ ranks: [0, 1, 2, 3], metrics: ["compute"] }), new Float32Array([1, 2, 3, 4]));
    expect(store.ranks).toEqual([0, 1, 2, 3]);
    expect(store.value("compute", 3, 4)).toBeCloseTo(0.3);
    expect(store.value("compute", 0, 4)).toBeUndefined();
    expect(store.value("compute", 3, 6)).toBe(4);
  });

  it("keeps steps in order whatever order they come in, and lets the oldest go", () => {
    const store = new StepStore(3);
    for (const step of [9, 2, 7, 5]) {
      store.addSteps([{ attempt: 0, step, startNs: 0, durationNs: step * 1e9, complete: true }]);
    }
    expect(store.steps).toEqual([5, 7, 9]);
    expect(durations(store).values).toEqual([5, 7, 9]);
    expect(store.durationOf(2)).toBeUndefined();
  });

  it("lets steps of the older attempt go first, also where their numbers are higher", () => {
    const store = new StepStore(4);
    const add = (attempt: number, ...steps: number[]): void =>
      store.addFrame(
        header({ attempt, steps, durationsNs: steps.map(() => 1e9), metrics: ["compute"] }),
        new Float32Array(2 * steps.length).fill(attempt + 1),
      );
    add(0, 7, 8, 9);
    add(1, 3, 4, 5);
    expect(store.steps).toEqual([3, 4, 5, 9]);
    expect(store.newest).toBe(5);
    expect([5, 9, 8].map((step) => store.value("compute", 0, step))).toEqual([2, 1, undefined]);
    add(1, 6, 7);
    expect(store.steps).toEqual([4, 5, 6, 7]);
    expect(store.attemptOf(7)).toBe(1);
  });
});
