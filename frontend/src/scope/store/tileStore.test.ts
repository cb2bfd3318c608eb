import { describe, expect, it, vi } from "vitest";
import { type TileAt } from "../client";
import { levelFor, TileStore, tilesOver } from "./tileStore";

const map = { run: "ab", sample: 0, layer: 3, head: 1, level: 0 };

describe("tiles", () => {
  it("cover a range below the diagonal", () => {
    const whole = { queryFrom: 0, queryTo: 600, keyFrom: 0, keyTo: 600 };
    expect(tilesOver(whole, 0).length).toBe(6);
    expect(tilesOver(whole, 2)).toEqual([{ query: 0, key: 0 }]);
    expect(tilesOver({ ...whole, queryFrom: 300, queryTo: 310, keyTo: 10 }, 0)).toEqual([
      { query: 1, key: 0 },
    ]);
  });

  it("get no finer than the pixels", () => {
    expect([levelFor(100, 500), levelFor(500, 500), levelFor(501, 500), levelFor(2048, 500)]).toEqual([
      0, 0, 1, 3,
    ]);
  });

  const tileAt = ({ query, key }: TileAt) => ({ rows: 1, columns: 1, values: Uint8Array.of(query, key) });
  const asking = () => vi.fn(async (_: unknown, at: readonly TileAt[]) => Promise.resolve(at.map(tileAt)));
  const view = (to: number) => tilesOver({ queryFrom: 0, queryTo: to, keyFrom: 0, keyTo: to }, 0);

  it("are fetched once, and again where the text has grown", async () => {
    const ask = asking();
    const store = new TileStore({ tiles: ask });
    const [one, other] = await Promise.all([store.get(map, view(300), 300), store.get(map, view(300), 300)]);
    expect(one).toEqual(view(300).map((at) => ({ ...at, tile: tileAt(at) })));
    expect(other).toEqual(one);
    expect(await store.get(map, view(300), 300)).toEqual(one);
    expect(ask.mock.calls).toEqual([[map, view(300)]]);
    await store.get(map, view(300), 301);
    expect(ask).toHaveBeenCalledTimes(2);
  });

  it("are asked for together, without those that are here, and no more at a time than the hub gives", async () => {
    const ask = asking();
    const store = new TileStore({ tiles: ask });
    await store.get(map, view(300), 2000);
    const found = await store.get(map, view(2000), 2000);
    expect(ask.mock.calls.map(([, at]) => at.length)).toEqual([3, 16, 16, 1]);
    expect(found.map(({ tile }) => [...tile.values])).toEqual(view(2000).map((at) => [at.query, at.key]));
  });

  it("are asked for again by who comes after a refusal", async () => {
    const ask = asking().mockRejectedValueOnce(new Error("no"));
    const store = new TileStore({ tiles: ask });
    await expect(store.get(map, view(300), 300)).rejects.toThrow("no");
    expect((await store.get(map, view(300), 300)).length).toBe(3);
  });
});
