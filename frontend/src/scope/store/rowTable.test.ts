import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { CHUNK_ROWS, RowTable } from "./rowTable";

describe("RowTable", () => {
  it("returns what was set, in any order of positions", () => {
    const position = fc.integer({ min: 0, max: 5 * CHUNK_ROWS });
    fc.assert(
      fc.property(fc.array(fc.tuple(position, fc.integer({ min: 0, max: 255 }))), (writes) => {
        const table = new RowTable("u8", 1, 0);
        for (const [at, value] of writes) table.set(at, Uint8Array.of(value), null);
        const last = new Map(writes);
        for (const [at, value] of last) expect(table.get(at)?.data[0]).toBe(value);
        expect(table.has(6 * CHUNK_ROWS)).toBe(false);
      }),
    );
  });
});
