import fc from "fast-check";
import { describe, expect, it, vi } from "vitest";
import { ApiClient, errorText, type ApiError } from "../api/client";
import { ScopeClient } from "./client";
import { SampleStore } from "./sampleStore";
import { levelFor, TileStore, tilesOver } from "./tileStore";
import { candidateName, pieces, visibleText } from "./tokenText";

describe("texts of tokens", () => {
  const sample = new SampleStore();
  sample.setPrompt({
    text: "né 👋 한",
    ids: [1, 2, 3, 4, 5, 6, 7],
    offsets: [[0, 1], [1, 2], [2, 3], null, null, [3, 5], [5, 7]],
  });
  sample.setToken(7, 8, "\n", null);
  sample.setToken(8, 9, " ok", null);

  it("tells a character of several tokens once, with its last one", () => {
    expect(pieces(sample).map((piece) => piece.label)).toEqual([
      "n",
      "é",
      "␣",
      "…",
      "…",
      "👋",
      "한",
      "↵",
      "ok",
    ]);
    expect(pieces(sample).filter((piece) => piece.partial).length).toBe(2);
  });

  it("names candidates by their text alone, and pieces of characters as such", () => {
    expect(candidateName(5, " the")).toBe("␣the");
    expect(candidateName(6, "\ufffd")).toBe("part of a character (token 6)");
    expect(candidateName(7, undefined)).toBe("token 7");
  });

  it("knows what was generated", () => {
    expect(pieces(sample, 6).map((piece) => piece.generated)).toEqual([false, true, true]);
  });

  it("loses nothing of a text but shows spaces at its ends and control signs", () => {
    expect(visibleText("  a b ")).toBe("␣␣a b␣");
    expect(visibleText("\t\n\u0000")).toBe("⇥↵␀");
    fc.assert(fc.property(fc.string(), (text) => visibleText(text).length === text.length));
  });
});

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

  it("are fetched once, and again where the text has grown", async () => {
    const tile = { rows: 1, columns: 1, values: Uint8Array.of(5) };
    const ask = vi.fn(async () => Promise.resolve(tile));
    const store = new TileStore({ tile: ask });
    const place = { run: "r", sample: 0, layer: 0, head: 0, level: 0, query: 0, key: 0 };
    await Promise.all([store.get(place, 10), store.get(place, 10)]);
    expect(store.peek(place, 10)).toBe(tile);
    await store.get(place, 11);
    expect(ask).toHaveBeenCalledTimes(2);
  });
});

describe("ScopeClient", () => {
  it("waits while a probe brings the numbers", async () => {
    const answers = [
      new Response('{"probe": "x", "retryMs": 300}', { status: 202 }),
      new Response(Uint8Array.of(1, 2), { headers: { "X-Tile-Shape": "1,2" } }),
    ];
    const asked: string[] = [];
    const waits: number[] = [];
    const api = new ApiClient(
      async (url) => (asked.push(String(url)), Promise.resolve(answers.shift() as Response)),
    );
    const client = new ScopeClient(api, async (ms) => Promise.resolve(void waits.push(ms)));
    const place = { run: "ab", sample: 0, layer: 3, head: 1, level: 0, query: 2, key: 1 };
    expect(await client.tile(place)).toEqual({ rows: 1, columns: 2, values: Uint8Array.of(1, 2) });
    expect(waits).toEqual([300]);
    expect(asked).toEqual(Array(2).fill("api/v1/scope/runs/ab/attention/0/3/1/0/2/1"));
  });

  it("hands on after how many seconds to come again, and the place before or after rotation", async () => {
    const body = JSON.stringify({ code: "queue-full", message: "16 prompts wait", hint: "Later." });
    const asked: string[] = [];
    const full = new ApiClient(async (url) => {
      asked.push(String(url));
      return Promise.resolve(new Response(body, { status: 429, headers: { "Retry-After": "7" } }));
    });
    const place = {
      run: "ab",
      site: "q",
      sample: 0,
      layer: 1,
      head: 2,
      position: 3,
      rotary: "before",
    } as const;
    const error = await new ScopeClient(full).values(place, "csv").catch((refused: unknown) => refused);
    expect(error).toMatchObject({ status: 429, code: "queue-full", retryAfterS: 7 });
    expect(errorText(error as ApiError)).toBe("16 prompts wait. Later. Try again in 7 s.");
    expect(asked[0]).toContain("rotary=before");
  });

  it("refuses a tile that is not of its shape, and tells an error's body", async () => {
    const wrong = new ApiClient(async () =>
      Promise.resolve(new Response(Uint8Array.of(1), { headers: { "X-Tile-Shape": "2,2" } })),
    );
    const place = { run: "ab", sample: 0, layer: 0, head: 0, level: 0, query: 0, key: 0 };
    await expect(new ScopeClient(wrong).tile(place)).rejects.toThrow("2 x 2");
    const body = JSON.stringify({ code: "invalid", message: "no", hint: "", places: [{ column: 5 }] });
    const refused = new ApiClient(async () => Promise.resolve(new Response(body, { status: 422 })));
    await expect(new ScopeClient(refused).stop("ab")).rejects.toMatchObject({
      status: 422,
      body: { places: [{ column: 5 }] },
    });
  });
});
