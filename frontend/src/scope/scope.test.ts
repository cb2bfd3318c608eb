import fc from "fast-check";
import { describe, expect, it, vi } from "vitest";
import { ApiClient, errorText, type ApiError } from "../api/client";
import { ScopeClient, type TileAt } from "./client";
import { ScopeFrame } from "./protocol";
import { SampleStore } from "./sampleStore";
import { scopeFrame } from "./testFrames";
import { levelFor, TileStore, tilesOver } from "./tileStore";
import { candidateName, labelText, pieces, spokenText, visibleText } from "./tokenText";

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
      "␣한",
      "↵",
      "␣ok",
    ]);
    expect(pieces(sample).filter((piece) => piece.partial).length).toBe(2);
  });

  it("tells tokens apart that differ in a leading space, in every form of their name", () => {
    const code = new SampleStore();
    code.setPrompt({ text: "self self", ids: [279, 291], offsets: [[0, 4], [4, 9]] }); // prettier-ignore
    const [bare, spaced] = pieces(code);
    expect([bare?.label, bare?.name, bare?.spoken]).toEqual(["self", "“self”", "“self”"]);
    expect([spaced?.label, spaced?.name, spaced?.spoken]).toEqual(["␣self", "“␣self”", "space “self”"]);
  });

  it("counts long runs of spaces on axes, and says white space in words", () => {
    expect(labelText("\n       ")).toBe("↵␣₇");
    expect(labelText("            x")).toBe("␣₁₂x");
    expect(labelText("   x")).toBe("␣␣␣x");
    expect(labelText("␣␣␣␣")).toBe("␣␣␣␣");
    expect(spokenText("\n       ")).toBe("line end, 7 spaces");
    expect(spokenText("\t\tfoo bar\n")).toBe("2 tabs “foo bar” line end");
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

const map = { run: "ab", sample: 0, layer: 3, head: 1, level: 0 };
const u8s = (n: string, s: number[], ...values: number[]) =>
  ({ n, c: "u8s", s, values: Uint8Array.from(values) }) as const;

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

describe("ScopeClient", () => {
  const tiles = (...given: ReturnType<typeof u8s>[]): Uint8Array<ArrayBuffer> =>
    new Uint8Array(scopeFrame(ScopeFrame.TILES, map, given));

  it("waits while a probe brings the numbers", async () => {
    const answers = [
      new Response('{"probe": "x", "retryMs": 300}', { status: 202 }),
      new Response(tiles(u8s("2,1", [1, 2], 1, 2), u8s("0,0", [1, 1], 3))),
    ];
    const asked: string[] = [];
    const waits: number[] = [];
    const api = new ApiClient(
      async (url) => (asked.push(String(url)), Promise.resolve(answers.shift() as Response)),
    );
    const client = new ScopeClient(api, async (ms) => Promise.resolve(void waits.push(ms)));
    const at = [
      { query: 0, key: 0 },
      { query: 2, key: 1 },
    ];
    expect(await client.tiles(map, at)).toEqual([
      { rows: 1, columns: 1, values: Uint8Array.of(3) },
      { rows: 1, columns: 2, values: Uint8Array.of(1, 2) },
    ]);
    expect(waits).toEqual([300]);
    expect(asked).toEqual(Array(2).fill("api/v1/scope/runs/ab/attention/0/3/1/0?tile=0,0&tile=2,1"));
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

  it("refuses tiles that are not there or not of their shape, and tells an error's body", async () => {
    const answers = [tiles(u8s("0,1", [1, 1], 1)), tiles(u8s("0,0", [4, 4], 1)), Uint8Array.of(1)];
    const wrong = new ApiClient(async () => Promise.resolve(new Response(answers.shift() ?? null)));
    for (const said of ["no tile 0,0", "tensor 0,0 ends at byte 16", "16 bytes"])
      await expect(new ScopeClient(wrong).tiles(map, [{ query: 0, key: 0 }])).rejects.toThrow(said);
    const body = JSON.stringify({ code: "invalid", message: "no", hint: "", places: [{ column: 5 }] });
    const refused = new ApiClient(async () => Promise.resolve(new Response(body, { status: 422 })));
    await expect(new ScopeClient(refused).stop("ab")).rejects.toMatchObject({
      status: 422,
      body: { places: [{ column: 5 }] },
    });
  });
});
