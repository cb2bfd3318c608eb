import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { patternNote } from "./headViews";
import { Cells } from "../../../render/cells";
import { fillAtlas } from "../../../scope/views/matrices";
import { SampleStore } from "../../../scope/store/sampleStore";

describe("patterns of heads", () => {
  it("have no cell without a token", () => {
    fc.assert(
      fc.property(fc.integer({ min: 1, max: 12 }), (tokens) => {
        const edge = 8;
        const at = (cell: number): number => Math.floor((cell * tokens) / edge);
        const holds = (cell: number): boolean => at(cell) < at(cell + 1);
        const values = Array.from({ length: edge * edge }, (_, index) =>
          holds(Math.floor(index / edge)) && holds(index % edge) ? 9 : 0,
        );
        const sample = new SampleStore();
        sample.atlas = { layers: 1, heads: 1, edge, values: Uint8Array.from(values) };
        sample.promptLength = tokens;
        const cells = new Cells();
        fillAtlas(cells, sample);
        expect(cells.columns).toBe(Math.min(edge, tokens));
        expect([...cells.values]).toEqual(Array.from({ length: Math.min(edge, tokens) ** 2 }, () => 9));
      }),
    );
  });

  it("say what they are of", () => {
    const sample = new SampleStore();
    sample.atlas = { layers: 1, heads: 1, edge: 8, values: new Uint8Array(64) };
    sample.promptLength = 3;
    expect(patternNote(sample)).toBe("each head over the 3 tokens of the prompt");
    sample.promptLength = 20;
    expect(patternNote(sample)).toContain("20 tokens of the prompt, 8 by 8, largest value of each cell");
  });
});
