import { describe, expect, it } from "vitest";
import { Cells, Mask } from "../../../render/cells";
import { probabilityMap } from "../../../render/maps";
import type { HeadScores } from "../../../scope/client";
import { fillScores, rankedHeads, scoreOf } from "./headScores";

const found: HeadScores = {
  sample: 0,
  tokens: 4,
  scores: ["previous", "first", "duplicate", "induction"],
  counts: [3, 3, 1, 0],
  values: [
    [
      [0.1, 0.5],
      [0.3, null],
    ],
    [[0, 1]],
    [[0, 0]],
    [[null, null]],
  ],
};

describe("scores of heads", () => {
  it("are ranked, and missing where the text has nothing to score", () => {
    expect(rankedHeads(found, "previous").map(({ layer, head }) => [layer, head])).toEqual([
      [0, 1],
      [1, 0],
      [0, 0],
    ]);
    expect(rankedHeads(found, "induction")).toEqual([]);
    expect(scoreOf(found, "first", 0, 1)).toBe(1);
    const cells = new Cells();
    fillScores(cells, found, "previous", probabilityMap("dark"), { layers: 2, heads: 2 });
    expect([...cells.mask]).toEqual([Mask.VALUE, Mask.VALUE, Mask.VALUE, Mask.MISSING]);
    expect(cells.at(1, 0)).toBe(Math.round(255 * Math.sqrt(0.5)));
  });
});
