import { mount } from "@vue/test-utils";
import fc from "fast-check";
import { describe, expect, it } from "vitest";
import type { RankView } from "../../api/types";
import { gridOf, placeOfRank, placeUnder, rankAt, TITLE } from "./rankGrid";
import RankGridMap from "./RankGridMap.vue";

const ranksOf = (stages: number, each: number): RankView[] =>
  Array.from(
    { length: stages * each },
    (_, rank) => ({ rank, pp: Math.floor(rank / each), role: "all", state: "training" }) as RankView,
  );

describe("ranks as squares", () => {
  it("have a place each, in which pixels and keys find them", () => {
    const sizes = [
      fc.integer({ min: 1, max: 9 }),
      fc.integer({ min: 1, max: 400 }),
      fc.integer({ min: 1, max: 900 }),
    ];
    fc.assert(
      fc.property(
        ...(sizes as [(typeof sizes)[0], (typeof sizes)[0], (typeof sizes)[0]]),
        (stages, each, width) => {
          const ranks = ranksOf(stages, each);
          const grid = gridOf(ranks, width);
          for (const { rank } of ranks) {
            const place = placeOfRank(grid, rank);
            expect(place && rankAt(grid, place)?.rank).toBe(rank);
            const block = grid.blocks.findLast(({ row }) => row <= (place?.row ?? 0));
            const y = (block?.y ?? 0) + ((place?.row ?? 0) - (block?.row ?? 0) + 0.5) * grid.size;
            expect(placeUnder(grid, ((place?.column ?? 0) + 0.5) * grid.size, y)).toEqual(place);
          }
        },
      ),
      { numRuns: 20 },
    );
  });

  it("fit a low picture at 10,000 ranks, and lie under no title", () => {
    const grid = gridOf(ranksOf(8, 1250), 340);
    expect(grid.height).toBeLessThanOrEqual(460);
    expect(grid.blocks).toHaveLength(8);
    expect(placeUnder(grid, 5, TITLE / 2)).toBeNull();
    expect(placeOfRank(grid, null)).toBeNull();
    expect(placeOfRank(grid, 10_000)).toBeNull();
  });

  it("need one element for all", () => {
    const ranks = ranksOf(8, 1250);
    const props = { ranks, selected: 3, slowdown: () => 1, isMarked: () => false, label: () => "" };
    const page = mount(RankGridMap, { props, global: { stubs: { PictureCanvas: true } } });
    expect(page.findAll("*").length).toBeLessThan(40);
    expect(page.get("[data-testid=rank-grid]").attributes("label")).toContain("10000 ranks");
    page.unmount();
  });
});
