import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { SampleStore } from "../../../scope/store/sampleStore";
import type { Lens } from "../../../scope/client";
import { differenceOf, firstDifferent, layersPair, lensPair, pooledRange, tokenPair } from "./differences";

/** A text of these ids whose residual norms are given, [position][layer]. */
function sampleOf(ids: readonly number[], norms: readonly (readonly number[])[]): SampleStore {
  const sample = new SampleStore();
  sample.setPrompt({ text: "", ids, offsets: [] });
  norms.forEach((row, position) => {
    const shape = [1, row.length];
    const data = Float32Array.from(row);
    sample.setRow({ name: "residual.norm", code: "f32", shape, data, scales: null }, 0, position);
  });
  return sample;
}

describe("differences", () => {
  it("are those of positions and layers that both runs have", () => {
    const finite = fc.float({ noNaN: true, noDefaultInfinity: true, min: -1e3, max: 1e3 });
    const rows = fc.array(fc.tuple(finite, finite, finite), { minLength: 1, maxLength: 6 });
    fc.assert(
      fc.property(rows, rows, (ofA, ofB) => {
        const [a, b] = [ofA, ofB].map((norms) =>
          sampleOf(
            norms.map((_, at) => at),
            norms,
          ),
        ) as [SampleStore, SampleStore];
        const pair = layersPair({ a, b }, "residual.norm", 2);
        expect([pair.rows, pair.columns]).toEqual([2, Math.min(ofA.length, ofB.length)]);
        differenceOf(pair).forEach((value, at) => {
          const [layer, position] = [Math.floor(at / pair.columns), at % pair.columns];
          const exact = Math.fround((ofB[position]?.[layer] ?? 0) - (ofA[position]?.[layer] ?? 0));
          expect(value).toBe(exact);
        });
      }),
    );
  });

  it("leave out what one run has not sent", () => {
    const samples = { a: sampleOf([1, 2], [[1], [2]]), b: sampleOf([1, 2], [[4]]) };
    expect([...differenceOf(layersPair(samples, "residual.norm", 1))]).toEqual([3, Number.NaN]);
    expect([...differenceOf(tokenPair(samples, "absent", 0, { layers: 1, a: 1, b: 1 }))]).toEqual([
      Number.NaN,
    ]);
  });

  it("read the same head of models with different numbers of heads", () => {
    const a = sampleOf([1], [[1, 2, 3, 4, 5, 6]]);
    const b = sampleOf([1], [[10, 20, 30, 40]]);
    const pair = tokenPair({ a, b }, "residual.norm", 0, { layers: 2, a: 3, b: 2 });
    expect([pair.columns, ...differenceOf(pair)]).toEqual([2, 9, 18, 26, 35]);
  });

  it("name the first token that differs", () => {
    expect(firstDifferent({ a: sampleOf([1, 2, 3], []), b: sampleOf([1, 2], []) })).toBeNull();
    expect(firstDifferent({ a: sampleOf([1, 2, 3], []), b: sampleOf([1, 9, 3], []) })).toBe(1);
  });

  it("end a pooled picture at the last position", () => {
    expect([0, 1, 2].map((cell) => pooledRange(cell, 4, 9))).toEqual(["0 to 3", "4 to 7", "8"]);
    expect(pooledRange(1, 4, 7)).toBe("4 to 6");
  });

  it("of the lens align positions, and compare a next token only where it is the same", () => {
    const lensOf = (positions: number[], values: number[]): Lens => ({
      sample: 0,
      layers: [0],
      positions,
      tokens: [],
      texts: [],
      ids: [],
      logprobs: [values.map((value) => [value])],
      entropy: [values],
      targetRank: [values],
      targetLogprob: [values],
      token: null,
      tokenRank: null,
      tokenLogprob: null,
    });
    const [a, b] = [lensOf([3, 4, 5], [-1, -2, -3]), lensOf([4, 5, 6], [-4, -8, -9])];
    const all = lensPair(a, b, "entropy", () => false);
    expect([...differenceOf(all)]).toEqual([-2, -5]);
    const next = lensPair(a, b, "target", (position) => position === 5);
    expect([...differenceOf(next)]).toEqual([Number.NaN, -5]);
  });
});
