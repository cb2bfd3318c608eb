import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { ticks } from "./ticks";

const spans = fc
  .tuple(fc.double({ min: -200, max: 200, noNaN: true }), fc.double({ min: 0.1, max: 300, noNaN: true }))
  .map(([from, size]) => ({ from, to: from + size }));

describe("ticks", () => {
  it("are round and within the range", () => {
    expect(ticks(0, 1, 5)).toEqual([0, 0.2, 0.4, 0.6000000000000001, 0.8, 1]);
    expect(ticks(3, 97, 4)).toEqual([50]);
    expect(ticks(0, 3, 10, 1)).toEqual([0, 1, 2, 3]);
    expect(ticks(5, 5, 4)).toEqual([]);
  });

  it("are never many more than asked for", () => {
    fc.assert(
      fc.property(spans, fc.integer({ min: 1, max: 20 }), (span, count) => {
        const found = ticks(span.from, span.to, count);
        expect(found.length).toBeLessThanOrEqual(count + 1);
        for (const tick of found) expect(tick).toBeGreaterThanOrEqual(span.from - 1e-6);
      }),
    );
  });
});
