import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { clamp, length, linear, pan, reveal, zoom, type Limits } from "./viewport";

const limits: Limits = { from: 0, to: 100, minimum: 5 };

const spans = fc
  .tuple(fc.double({ min: -200, max: 200, noNaN: true }), fc.double({ min: 0.1, max: 300, noNaN: true }))
  .map(([from, size]) => ({ from, to: from + size }));

describe("viewport", () => {
  it("never leaves its limits, whatever is done to it", () => {
    const factor = fc.double({ min: 0.01, max: 100, noNaN: true });
    fc.assert(
      fc.property(spans, factor, fc.double({ min: -3, max: 3, noNaN: true }), (span, by, share) => {
        const start = clamp(span, limits);
        for (const view of [
          start,
          zoom(start, by, 40, limits),
          pan(start, share, limits),
          reveal(start, 60, 2, limits),
        ]) {
          expect(view.from).toBeGreaterThanOrEqual(limits.from - 1e-9);
          expect(view.to).toBeLessThanOrEqual(limits.to + 1e-9);
          expect(length(view)).toBeGreaterThanOrEqual(limits.minimum - 1e-9);
        }
      }),
    );
  });

  it("keeps what is under the pointer while zooming", () => {
    const before = { from: 20, to: 60 };
    const after = zoom(before, 0.5, 30, limits);
    expect(linear(after, 0, 400).toPixel(30)).toBeCloseTo(linear(before, 0, 400).toPixel(30));
    expect(length(after)).toBeCloseTo(20);
  });

  it("shows the whole where the range is shorter than the shortest window", () => {
    expect(clamp({ from: 0, to: 1 }, { from: 0, to: 2, minimum: 5 })).toEqual({ from: 0, to: 5 });
  });

  it("moves to what is to be seen and else stays", () => {
    const view = { from: 10, to: 30 };
    expect(reveal(view, 12, 1, limits)).toBe(view);
    const moved = reveal(view, 70, 1, limits);
    expect(moved.from).toBeLessThanOrEqual(70);
    expect(moved.to).toBeGreaterThanOrEqual(71);
    expect(length(moved)).toBeCloseTo(20);
  });

  it("maps back what it mapped", () => {
    const scale = linear({ from: -3, to: 11 }, 60, 900);
    expect(scale.toValue(scale.toPixel(4.25))).toBeCloseTo(4.25);
  });
});
