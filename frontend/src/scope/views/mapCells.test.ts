import { describe, expect, it } from "vitest";
import { Cells } from "../../render/cells";
import { addRow, codeAt, layTiles } from "./mapCells";
import { TILE } from "../store/tileStore";

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
