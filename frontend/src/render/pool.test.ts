import { describe, expect, it } from "vitest";
import { maxPool } from "./pool";

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
