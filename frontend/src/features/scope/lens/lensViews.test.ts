import { describe, expect, it } from "vitest";
import { Cells, Mask } from "../../../render/cells";
import type { Lens } from "../../../scope/client";
import { inkOn } from "../heatmap/drawCellTexts";
import { fillLens, lensMap, lensText, lensTexts, lensValue, rankMap, windowOf } from "./lensViews";

const lens: Lens = {
  sample: 0,
  layers: [0, 1],
  positions: [4, 5],
  tokens: [7, 9],
  texts: ["a", "b"],
  ids: [
    [[7], [9]],
    [[9], [7]],
  ],
  logprobs: [
    [[Math.log(0.25)], [Math.log(0.5)]],
    [[0], [null]],
  ],
  entropy: [
    [1, 2],
    [0, 0.5],
  ],
  targetRank: [
    [0, null],
    [5, null],
  ],
  targetLogprob: [
    [-1, null],
    [-2, null],
  ],
  token: null,
  tokenRank: null,
  tokenLogprob: null,
};

describe("the logit lens", () => {
  it("shows probabilities, entropies and ranks, and nothing where there is none", () => {
    expect(lensValue(lens, "top", 0, 0)).toBeCloseTo(0.25);
    expect(lensText("top", lensValue(lens, "top", 0, 1))).toBe("50.0 %");
    expect(lensText("rank", lensValue(lens, "rank", 1, 0))).toBe("rank 5");
    expect(lensValue(lens, "rank", 0, 1)).toBeNull();
    expect(lensValue(lens, "watched", 0, 0)).toBeNull();
    const cells = new Cells();
    fillLens(cells, lens, "rank", lensMap("rank", "dark", 100));
    expect([...cells.mask]).toEqual([Mask.VALUE, Mask.MISSING, Mask.VALUE, Mask.MISSING]);
    expect(cells.at(0, 0)).toBe(255);
  });

  it("has the likeliest token at the bright end of the scale of ranks", () => {
    const map = rankMap(1000);
    expect([map.position(0), map.position(999)]).toEqual([1, 0]);
    expect(map.position(10)).toBeGreaterThan(map.position(20));
  });

  it("reads as many positions together as one answer may have", () => {
    expect(windowOf(300, 600, 32, 10)).toEqual({ first: 256, end: 512 });
    expect(windowOf(599, 600, 32, 10)).toEqual({ first: 512, end: 600 });
    expect(windowOf(5, 600, 512, 10)).toEqual({ first: 0, end: 25 });
    expect(windowOf(0, 3, 4, 5)).toEqual({ first: 0, end: 3 });
  });

  it("names tokens by their texts, and writes on any colour", () => {
    expect(lensTexts(lens).get(9)).toBe("b");
    const table = Uint8ClampedArray.from([0, 0, 0, 255, 255, 255]);
    expect([inkOn(table, 0), inkOn(table, 1)]).toEqual(["#fff", "#111"]);
  });
});
