import { describe, expect, it } from "vitest";
import { colourAt, gradient, magnitudeMap, slowdownMap, type Rgb } from "./colour";

/** Lightness of an sRGB colour, CIE L* (0 .. 100). */
function lightness([red, green, blue]: Rgb): number {
  const channel = (value: number): number => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  };
  const y = 0.2126 * channel(red) + 0.7152 * channel(green) + 0.0722 * channel(blue);
  return y > 216 / 24389 ? 116 * Math.cbrt(y) - 16 : y * (24389 / 27);
}

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
