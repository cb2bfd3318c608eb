import { describe, expect, it } from "vitest";
import { SeriesStore } from "./seriesStore";

describe("SeriesStore", () => {
  it("merges points that come twice and out of order", () => {
    const series = new SeriesStore();
    series.add("loss", { attempts: [0, 0, 0], steps: [1, 2, 4], values: [9, 8, 6] });
    series.add("loss", { attempts: [0, 1, 0], steps: [3, 2, 5], values: [7, 8.5, null] });
    series.add("loss", { attempts: [0], steps: [2], values: [1] });
    expect(series.curve("loss")).toEqual({
      steps: [1, 2, 3, 4, 5],
      values: [9, 8.5, 7, 6, NaN],
      attempts: [0, 1, 0, 0, 0],
    });
  });

  it("has the newest value of the newest attempt, also where that is no number", () => {
    const series = new SeriesStore();
    expect(series.newest("loss")).toBeUndefined();
    series.add("loss", { attempts: [0, 0, 0], steps: [1, 2, 3], values: [9, 8, 7] });
    expect(series.newest("loss")).toBe(7);
    series.add("loss", { attempts: [1], steps: [2], values: [8.5] });
    expect(series.newest("loss")).toBe(8.5);
    series.add("loss", { attempts: [1], steps: [3], values: [null] });
    expect(series.newest("loss")).toBeNaN();
  });

  it("is bounded", () => {
    const series = new SeriesStore(2);
    series.add("loss", { attempts: [0, 0, 0], steps: [1, 2, 3], values: [1, 2, 3] });
    expect(series.curve("loss").steps).toEqual([2, 3]);
  });

  it("keeps the attempt that resumed below the last step of the one before", () => {
    const series = new SeriesStore(4);
    series.add("loss", { attempts: [0, 0, 0], steps: [7, 8, 9], values: [7, 8, 9] });
    series.add("loss", { attempts: [1, 1, 1], steps: [3, 4, 5], values: [3, 4, 5] });
    expect(series.curve("loss")).toEqual({
      steps: [3, 4, 5, 9],
      values: [3, 4, 5, 9],
      attempts: [1, 1, 1, 0],
    });
    expect(series.newest("loss")).toBe(5);
  });
});
