import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { colourAt, gradient, magnitudeMap, slowdownMap, type Rgb } from "./colour";
import { maxPool } from "./pool";
import { ticks } from "./ticks";
import { clamp, length, linear, pan, reveal, zoom, type Limits } from "./viewport";

/** Lightness of an sRGB colour, CIE L* (0 .. 100). */
function lightness([red, green, blue]: Rgb): number {
  const channel = (value: number): number => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  };
  const y = 0.2126 * channel(red) + 0.7152 * channel(green) + 0.0722 * channel(blue);
  return y > 216 / 24389 ? 116 * Math.cbrt(y) - 16 : y * (24389 / 27);
}

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

describe("maxPool", () => {
  it("keeps a single slow step when columns are merged", () => {
    const values = new Float32Array(1000).fill(1);
    values[617] = 9;
    const pooled = maxPool(values, 1000, 1, 50);
    expect(pooled).toHaveLength(50);
    expect(Math.max(...pooled)).toBe(9);
  });

  it("lets numbers win over missing ones and keeps rows apart", () => {
    const missing = Number.NaN;
    expect([...maxPool(new Float32Array([missing, 2, missing, missing, 5, 4, 3, missing]), 4, 2, 2)]).toEqual(
      [2, missing, 5, 3],
    );
  });

  it("leaves a matrix alone that fits", () => {
    const values = new Float32Array([1, 2]);
    expect(maxPool(values, 2, 1, 10)).toBe(values);
  });
});

describe("colour maps", () => {
  it("grow lighter all the way for magnitudes", () => {
    const map = magnitudeMap(0, 1);
    const steps = Array.from({ length: 33 }, (_, index) => lightness(colourAt(map, index / 32)));
    for (let index = 1; index < steps.length; index += 1) {
      expect(steps[index]).toBeGreaterThan(steps[index - 1] ?? 0);
    }
  });

  it.each(["dark", "light"] as const)("have their quiet point at 1 in the %s slowdown map", (theme) => {
    const map = slowdownMap(theme);
    expect(map.position(1)).toBeCloseTo(0.5);
    expect(map.position(2)).toBe(1);
    expect(map.position(0.5)).toBe(0);
    expect(map.position(64)).toBe(1);
    const [slow, healthy] = [lightness(colourAt(map, 2)), lightness(colourAt(map, 1))];
    expect(Math.abs(slow - healthy)).toBeGreaterThan(40);
  });

  it("give CSS gradients from end to end", () => {
    expect(gradient(magnitudeMap(0, 2), 2)).toBe("linear-gradient(to right, rgb(68 1 84), rgb(253 231 37))");
  });
});
