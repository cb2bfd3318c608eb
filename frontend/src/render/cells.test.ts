import { describe, expect, it } from "vitest";
import { Cells, Mask } from "./cells";

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
