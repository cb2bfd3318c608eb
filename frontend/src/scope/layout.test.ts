import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { nearestHead, ownerOf, shards, shardTitle } from "./layout";

describe("ranks", () => {
  const sizes = fc.record({
    tensor: fc.constantFrom(1, 2, 4),
    pipeline: fc.constantFrom(1, 2, 3),
    layers: fc.integer({ min: 3, max: 40 }),
    heads: fc.constantFrom(4, 8, 12),
  });

  it("hold the layers that they said, however uneven", () => {
    const said = [
      { rank: 0, stage: 0, tensor: 0, layers: [0, 1], heads: [0, 4] },
      { rank: 4, stage: 1, tensor: 0, layers: [1, 8], heads: [0, 4] },
    ] as const;
    const all = shards({ layers: 8, heads: 4 }, { tensor: 1, pipeline: 2, ranks: said });
    expect([0, 1, 3, 7].map((layer) => ownerOf(all, { layer, head: 0 })?.rank)).toEqual([0, 4, 4, 4]);
    expect(shardTitle(all[1] as (typeof all)[0])).toContain("layers 1 to 7");
  });

  it("share layers and heads without a hole, and each head has one owner", () => {
    fc.assert(
      fc.property(sizes, fc.nat(), fc.nat(), (size, a, b) => {
        const all = shards(size, size);
        const at = { layer: a % size.layers, head: b % size.heads };
        const held = all.filter(
          ({ layers, heads }) =>
            at.layer >= layers[0] && at.layer < layers[1] && at.head >= heads[0] && at.head < heads[1],
        );
        expect(held.length).toBe(1);
        expect(ownerOf(all, at)).toBe(held[0]);
        for (const one of all) expect(ownerOf(all, nearestHead(one, at))).toBe(one);
      }),
    );
  });

  it("count tensor first, and say what they hold", () => {
    const all = shards({ layers: 4, heads: 4 }, { tensor: 2, pipeline: 2 });
    expect(all.map(shardTitle)).toEqual([
      "0: layers 0 to 1, heads 0 to 1",
      "1: layers 0 to 1, heads 2 to 3",
      "2: layers 2 to 3, heads 0 to 1",
      "3: layers 2 to 3, heads 2 to 3",
    ]);
    const one = shards({ layers: 1, heads: 1 }, { tensor: 1, pipeline: 1, ranks: null });
    expect(one.map(shardTitle)).toEqual(["0: layer 0, head 0"]);
  });
});
