import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { placeAt as pixelPlace, frameOf, scalesOf, type HeatPicture } from "../features/scope/heatPicture";
import { QUANTITIES, quantityMap } from "../features/scope/quantities";
import { Cells, Mask } from "../render/cells";
import { colourAt } from "../render/colour";
import { probabilityMap, signedMap } from "../render/maps";
import { encodeNumbers } from "./codes";
import { addRow, codeAt, layTiles } from "./mapCells";
import {
  codeOf,
  domainOf,
  fillAtlas,
  fillHeads,
  fillLayers,
  fillStrip,
  heldDomain,
  shownFor,
  stripOf,
} from "./matrices";
import { SampleStore } from "./sampleStore";
import type { Code, Tensor } from "./tensors";
import { TILE } from "./tileStore";

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

describe("Cells", () => {
  it("knows what changed, and only that", () => {
    const cells = new Cells(4, 4);
    expect(cells.takeDirty()).toEqual({ column: 0, row: 0, columns: 4, rows: 4 });
    expect(cells.takeDirty()).toBeNull();
    cells.set(1, 2, 9);
    cells.write({ column: 2, row: 3, columns: 2, rows: 1 }, Uint8Array.of(5, 6));
    expect(cells.takeDirty()).toEqual({ column: 1, row: 2, columns: 3, rows: 2 });
    expect([cells.at(1, 2), cells.at(2, 3), cells.at(3, 3), cells.has(0, 0)]).toEqual([9, 5, 6, false]);
  });

  it("fills a block, and no cell beside it", () => {
    const cells = new Cells(3, 4);
    cells.takeDirty();
    cells.fill({ column: 1, row: 1, columns: 2, rows: 2 }, 7);
    expect([...cells.values]).toEqual([0, 0, 0, 0, 7, 7, 0, 7, 7, 0, 0, 0]);
    expect([0, 1, 2, 3].map((row) => cells.has(1, row))).toEqual([false, true, true, false]);
    expect([cells.count(Mask.VALUE), cells.takeDirty()]).toEqual([
      4,
      { column: 1, row: 1, columns: 2, rows: 2 },
    ]);
  });

  it("leaves out what a block has beyond the edge", () => {
    const cells = new Cells(2, 2);
    cells.write({ column: 1, row: 1, columns: 2, rows: 2 }, Uint8Array.of(1, 2, 3, 4));
    expect([...cells.values]).toEqual([0, 0, 0, 1]);
  });
});

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
    expect(heldDomain(first, [1, 50, Number.NaN])).toEqual({ low: 0, high: first.high, clipped: 1, nans: 1 });
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

describe("large attention maps", () => {
  const range = { queryFrom: 0, queryTo: 300, keyFrom: 0, keyTo: 300 };
  const tile = (value: number, rows: number, columns: number) => ({
    rows,
    columns,
    values: new Uint8Array(rows * columns).fill(value),
  });

  it("put tiles where they belong, with 0 above the diagonal and room for what comes", () => {
    const cells = new Cells();
    const place = layTiles(cells, range, 0, [
      { query: 0, key: 0, tile: tile(1, TILE, TILE) },
      { query: 1, key: 0, tile: tile(2, 44, TILE) },
      { query: 1, key: 1, tile: tile(3, 44, 44) },
    ]);
    const at = (query: number, key: number): number | undefined => codeAt(cells, place, query, key);
    expect([at(5, 5), at(260, 5), at(299, 299), at(5, 6), at(300, 0)]).toEqual([
      1,
      2,
      3,
      undefined,
      undefined,
    ]);
    expect([cells.at(299, 0), cells.has(299, 0)]).toEqual([0, true]);
    expect(addRow(cells, place, 300, new Uint8Array(301).fill(9))).toBe(true);
    expect([at(300, 0), at(300, 300), at(299, 299)]).toEqual([9, 9, 3]);
    expect(addRow(cells, place, 512, new Uint8Array(513))).toBe(false);
  });

  it("keep the largest of the rows that share a cell", () => {
    const cells = new Cells();
    const place = layTiles(cells, range, 2, [{ query: 0, key: 0, tile: tile(4, 75, 75) }]);
    addRow(
      cells,
      place,
      299,
      Uint8Array.from({ length: 300 }, (_, key) => (key === 9 ? 200 : 0)),
    );
    expect([codeAt(cells, place, 298, 8), codeAt(cells, place, 298, 40)]).toEqual([200, 4]);
  });
});

describe("layout of a heat map", () => {
  const picture: HeatPicture = {
    cells: new Cells(20, 10),
    group: 1,
    map: probabilityMap("dark"),
    rows: { from: 2, to: 8 },
    columns: { from: 5, to: 15 },
    rowLabels: { text: String, size: 40 },
    columnLabels: { text: String, size: 20 },
    gaps: false,
    marks: [],
  };
  const frame = frameOf(picture, 241, 141);

  it("finds the place under every pixel, and none beside the cells", () => {
    const scales = scalesOf(picture, frame);
    fc.assert(
      fc.property(fc.integer({ min: 2, max: 7 }), fc.integer({ min: 5, max: 14 }), (row, column) => {
        const [x, y] = [scales.x.toPixel(column + 0.5), scales.y.toPixel(row + 0.5)];
        expect(pixelPlace(picture, frame, x, y)).toEqual({ row, column });
      }),
    );
    expect(pixelPlace(picture, frame, 20, 60)).toBeNull();
    expect(pixelPlace(picture, frame, 100, 10)).toBeNull();
  });
});

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
