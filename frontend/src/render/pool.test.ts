import { describe, expect, it } from "vitest";
import { maxPool, maxPoolRows } from "./pool";

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

describe("maxPoolRows", () => {
  it("keeps a single slow rank when rows are merged, and columns apart", () => {
    const values = new Float32Array(2000).fill(1);
    values[617 * 2 + 1] = 9;
    values[0] = Number.NaN;
    const pooled = maxPoolRows(values, 2, 1000, 50);
    expect(pooled).toHaveLength(100);
    expect(pooled.indexOf(9)).toBe(Math.floor((617 * 50) / 1000) * 2 + 1);
    expect(pooled[0]).toBe(1);
    expect(maxPoolRows(values, 2, 1000, 1000)).toBe(values);
  });
});
