import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { Cells, Mask } from "../../render/cells";
import { encodeNumbers } from "../tensors/testCodes";
import {
  codeOf,
  domainOf,
  fillAtlas,
  fillHeads,
  fillLayers,
  fillStrip,
  fixedDomain,
  shownFor,
  stripOf,
} from "./matrices";
import { SampleStore } from "../store/sampleStore";
import type { Code, Tensor } from "../tensors/tensors";

function tensor(name: string, code: Code, shape: number[], values: number[]): Tensor {
  const { data, scales } = encodeNumbers(code as "f32", Float32Array.from(values), shape.at(-1));
  return { name, code, shape, data, scales };
}

function sampleOf(...tensors: Tensor[]): SampleStore {
  const sample = new SampleStore();
  sample.setPrompt({
    text: "abc",
    ids: [1, 2, 3],
    offsets: [
      [0, 1],
      [1, 2],
      [2, 3],
    ],
  });
  for (const one of tensors)
    for (let row = 0; row < (one.shape[0] ?? 0); row += 1) sample.setRow(one, row, row * 2);
  return sample;
}

describe("matrices", () => {
  it("put layers by tokens, with what never came missing and what is no number told apart", () => {
    const sample = sampleOf(tensor("residual.norm", "f32", [2, 2], [1, 2, Number.NaN, 4]));
    const cells = new Cells(3, 2);
    fillLayers(cells, sample, "residual.norm", { low: 0, high: 4, clipped: 0, nans: 0 }, 0, 3);
    expect([...cells.mask]).toEqual([
      Mask.VALUE,
      Mask.MISSING,
      Mask.NAN,
      Mask.VALUE,
      Mask.MISSING,
      Mask.VALUE,
    ]);
    expect([cells.at(0, 0), cells.at(0, 1), cells.at(2, 1)]).toEqual([64, 128, 255]);
  });

  it("never give the numbers of a token as those of another, and tell whose can be shown instead", () => {
    const sample = sampleOf(tensor("q", "f32", [2, 1, 1], [7, 8]));
    sample.stride = 2;
    expect([0, 1, 2, 3].map((at) => stripOf(sample, "q", at, 1)?.values[0])).toEqual([
      7,
      undefined,
      8,
      undefined,
    ]);
    expect([0, 1, 2, 3].map((at) => shownFor(sample, "q", at))).toEqual([0, 0, 2, null]);
    expect(shownFor(sample, "k", 0)).toBeNull();
  });

  it("let a token's cell reach to the next that has numbers", () => {
    const sample = sampleOf(tensor("residual.norm", "f32", [2, 1], [1, 3]));
    sample.stride = 2;
    const cells = new Cells(4, 1);
    fillLayers(cells, sample, "residual.norm", { low: 0, high: 4, clipped: 0, nans: 0 }, 0, 4);
    expect([0, 1, 2, 3].map((at) => (cells.has(at, 0) ? cells.at(at, 0) : null))).toEqual([
      64,
      64,
      191,
      null,
    ]);
  });

  it("read strips with the scale of each row", () => {
    const sample = sampleOf(tensor("q", "i8", [1, 2, 2], [126, -63, 12.6, 0]));
    const strip = stripOf(sample, "q", 0, 2);
    expect([...(strip?.values ?? [])].map((value) => +value.toFixed(3))).toEqual([126, -63, 12.6, 0]);
    const cells = new Cells();
    if (strip) fillStrip(cells, strip, () => ({ low: -126, high: 126, clipped: 0, nans: 0 }));
    expect([...cells.values]).toEqual([255, 64, 140, 128]);
  });

  it("put heads by layers, and their patterns edge to edge", () => {
    const sample = sampleOf(tensor("head.max", "u8", [1, 2, 2], [0, 0.2, 0.4, 1]));
    const cells = new Cells();
    fillHeads(cells, sample, "head.max", 0, { layers: 2, heads: 2 });
    expect([...cells.values]).toEqual([0, 51, 102, 255]);
    sample.atlas = { layers: 1, heads: 2, edge: 2, values: Uint8Array.of(1, 2, 3, 4, 5, 6, 7, 8) };
    fillAtlas(cells, sample);
    sample.promptLength = 2;
    fillAtlas(cells, sample);
    expect([...cells.values]).toEqual([1, 2, 5, 6, 3, 4, 7, 8]);
  });

  it("hold a domain for other numbers, and count what lies beyond it", () => {
    const first = domainOf([0, 1, 2], false);
    expect(fixedDomain(first, [1, 50, Number.NaN])).toEqual({
      low: 0,
      high: first.high,
      clipped: 1,
      nans: 1,
    });
  });

  it("choose domains that hold all but the largest twentieth, symmetric where there is a sign", () => {
    const many = Array.from({ length: 101 }, (_, index) => index);
    expect(domainOf([...many, Number.NaN], false)).toEqual({ low: 0, high: 95, clipped: 5, nans: 1 });
    expect(domainOf([-3, 1, 2], true)).toMatchObject({ low: -2, high: 2 });
    expect(domainOf([0, 0], true)).toMatchObject({ low: -1, high: 1, clipped: 0 });
    fc.assert(
      fc.property(fc.array(fc.float()), (values) => {
        const { low, high } = domainOf(values, false);
        return high > low && Number.isInteger(codeOf(values[0] ?? 0, { low, high }) || 0);
      }),
    );
  });
});
