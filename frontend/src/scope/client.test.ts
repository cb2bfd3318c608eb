import { describe, expect, it } from "vitest";
import { ApiClient, errorText, type ApiError } from "../api/client";
import { ScopeClient } from "./client";
import { ScopeFrame } from "./protocol";
import { scopeFrame } from "./testFrames";

const map = { run: "ab", sample: 0, layer: 3, head: 1, level: 0 };

const u8s = (n: string, s: number[], ...values: number[]) =>
  ({ n, c: "u8s", s, values: Uint8Array.from(values) }) as const;

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
