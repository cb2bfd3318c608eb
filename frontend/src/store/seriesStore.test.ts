import { describe, expect, it } from "vitest";
import { position, SeriesStore } from "./seriesStore";

describe("SeriesStore", () => {
  it("merges points that come twice and out of order", () => {
    const series = new SeriesStore();
    series.add("loss", { attempts: [0, 0, 0], steps: [1, 2, 4], values: [9, 8, 6] });
    series.add("loss", { attempts: [0, 1, 0], steps: [3, 2, 5], values: [7, 8.5, null] });
    series.add("loss", { attempts: [0], steps: [2], values: [1] });
    expect(series.curve("loss")).toEqual({
      steps: [1, 2, 3, 4],
      values: [9, 8.5, 7, 6],
      attempts: [0, 1, 0, 0],
    });
  });

  it("is bounded", () => {
    const series = new SeriesStore(2);
    series.add("loss", { attempts: [0, 0, 0], steps: [1, 2, 3], values: [1, 2, 3] });
    expect(series.curve("loss").steps).toEqual([2, 3]);
  });

  it("finds positions", () => {
    expect([0, 1, 2, 3, 9].map((value) => position([1, 2, 4], value))).toEqual([0, 0, 1, 2, 3]);
  });
});
