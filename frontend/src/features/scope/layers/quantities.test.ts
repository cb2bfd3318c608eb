import { describe, expect, it } from "vitest";
import { QUANTITIES, quantityMap } from "./quantities";
import { colourAt } from "../../../render/colour";
import { probabilityMap, signedMap } from "../../../render/maps";
import { domainOf } from "../../../scope/views/matrices";

describe("colour maps of MegaScope", () => {
  it.each(["dark", "light"] as const)("grow steadily in lightness on %s", (theme) => {
    const light = [0, 0.01, 0.05, 0.2, 0.5, 1].map((p) =>
      colourAt(probabilityMap(theme), p).reduce((a, b) => a + b),
    );
    const sorted = light.toSorted((a, b) => (theme === "dark" ? a - b : b - a));
    expect(light).toEqual(sorted);
  });

  it("keep zero in the middle", () => {
    const map = signedMap("light", 3);
    const [red, green, blue] = colourAt(map, 0);
    expect(Math.max(red, green, blue) - Math.min(red, green, blue)).toBeLessThan(12);
    expect(colourAt(map, -3)).not.toEqual(colourAt(map, 3));
  });

  it.each(QUANTITIES)("paint $value: only a cosine of 0 is neutral", ({ value, signed }) => {
    const domain = domainOf([-0.36, 0.2, 0.9, 1], signed);
    const map = quantityMap("light", signed, domain);
    const [red, green, blue] = colourAt(map, 0);
    const isNeutral = Math.max(red, green, blue) - Math.min(red, green, blue) < 12;
    expect([map.position(0) === 0.5, isNeutral]).toEqual(Array(2).fill(value === "residual.cosine"));
  });
});
