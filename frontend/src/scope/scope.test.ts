import fc from "fast-check";
import { describe, expect, it, vi } from "vitest";
import { ApiClient } from "../api/client";
import { ScopeClient } from "./client";
import { FrameStore } from "./frameStore";
import { ScopeFrame } from "./protocol";
import { SampleStore } from "./sampleStore";
import { ScopeStream } from "./stream";
import { scopeFrame } from "./testFrames";
import { levelFor, TileStore, tilesOver } from "./tileStore";
import { pieces, visibleText } from "./tokenText";
import { allowed, TEMPERATURES, whatIf } from "./whatIf";

const logits = fc.array(fc.float({ min: -30, max: 30, noNaN: true }), { minLength: 2, maxLength: 40 });

/** As the model's rank works it out. */
function partitionOf(all: readonly number[]): Float32Array {
  return Float32Array.from(TEMPERATURES, (temperature) => {
    const highest = Math.max(...all) / temperature;
    return highest + Math.log(all.reduce((sum, logit) => sum + Math.exp(logit / temperature - highest), 0));
  });
}

describe("whatIf", () => {
  it("sums to one over the vocabulary at every temperature", () => {
    fc.assert(
      fc.property(logits, (all) => {
        TEMPERATURES.forEach((_, index) => {
          const sum = whatIf(Float32Array.from(all), partitionOf(all), index).reduce((a, b) => a + b, 0);
          expect(sum).toBeCloseTo(1, 3);
        });
      }),
    );
  });

  it("equals a softmax worked out by hand", () => {
    const [one, half] = [TEMPERATURES.indexOf(1), TEMPERATURES.indexOf(0.5)];
    const all = Float32Array.of(Math.log(3), 0);
    expect([...whatIf(all, partitionOf([...all]), one)].map((p) => +p.toFixed(6))).toEqual([0.75, 0.25]);
    expect([...whatIf(all, partitionOf([...all]), half)].map((p) => +p.toFixed(6))).toEqual([0.9, 0.1]);
  });

  it("never lets a colder choice be more even", () => {
    fc.assert(
      fc.property(logits, (all) => {
        const sorted = Float32Array.from(all.toSorted((a, b) => b - a));
        const first = TEMPERATURES.map((_, index) => whatIf(sorted, partitionOf(all), index)[0] ?? 0);
        first
          .slice(1)
          .forEach((value, index) => expect(value).toBeLessThanOrEqual((first[index] ?? 0) + 1e-4));
      }),
    );
  });

  it("cuts as sampling does: top-k, then top-p", () => {
    const falling = Float64Array.of(0.5, 0.3, 0.1, 0.05);
    expect(allowed(falling, 0, 1)).toBe(4);
    expect(allowed(falling, 2, 1)).toBe(2);
    expect(allowed(falling, 0, 0.75)).toBe(2);
    expect(allowed(falling, 2, 0.6)).toBe(1);
  });
});

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

class Socket {
  readyState = 1;
  binaryType = "";
  onopen: (() => void) | null = null;
  onmessage: ((event: { data: ArrayBufferLike }) => void) | null = null;
  onclose: (() => void) | null = null;
  readonly sent: Record<string, unknown>[] = [];
  send(text: string): void {
    this.sent.push(JSON.parse(text) as Record<string, unknown>);
  }
  close(): void {
    this.readyState = 3;
  }
}

describe("ScopeStream", () => {
  function started() {
    const sockets: Socket[] = [];
    const timers: (() => void)[] = [];
    const world = {
      connect: (_: string, protocol?: string) => {
        expect(protocol).toBe("megatronapp.scope.1");
        sockets.push(new Socket());
        return sockets.at(-1) as unknown as WebSocket;
      },
      now: () => 0,
      random: () => 0.5,
      later: (run: () => void, ms: number) => (ms < 60_000 && timers.push(run), () => undefined),
    };
    const store = new FrameStore();
    const events = {
      onHello: vi.fn(),
      onStatus: vi.fn(),
      onChange: vi.fn(),
      onState: vi.fn(),
      onProblem: vi.fn(),
    };
    const stream = new ScopeStream("ws://hub", store, events, world);
    stream.open();
    sockets[0]?.onopen?.();
    const give = (bytes: Uint8Array): void => sockets.at(-1)?.onmessage?.({ data: bytes.buffer });
    return { stream, sockets, timers, events, give, store };
  }
  const hello = scopeFrame(ScopeFrame.HELLO, { job: "tiny" });
  const run = (seq: number): Uint8Array => scopeFrame(ScopeFrame.RUN, { seq, run: "ab", state: "decoding" });

  it("gives credit back for what was painted, once", () => {
    const { stream, sockets, give, events } = started();
    give(hello);
    give(run(1));
    expect(sockets[0]?.sent).toEqual([]);
    stream.painted();
    stream.painted();
    expect(sockets[0]?.sent).toEqual([{ type: "credit", bytes: hello.length + run(1).length }]);
    expect(events.onHello).toHaveBeenCalledWith(expect.objectContaining({ job: "tiny" }));
    expect(events.onChange).toHaveBeenCalledTimes(2);
  });

  it("asks after a reconnect for what it missed", () => {
    const { stream, sockets, timers, give } = started();
    give(hello);
    stream.follow("ab");
    give(run(7));
    sockets[0]?.onclose?.();
    timers.at(-1)?.();
    sockets[1]?.onopen?.();
    give(hello);
    expect(sockets[0]?.sent).toEqual([{ type: "resume", run: "ab", seq: 0 }]);
    expect(sockets[1]?.sent).toEqual([{ type: "resume", run: "ab", seq: 7 }]);
  });

  it("says what it cannot read and goes on", () => {
    const { give, events, store } = started();
    give(scopeFrame(ScopeFrame.RUN, { seq: 1 }));
    give(new Uint8Array(8));
    expect(events.onProblem).toHaveBeenCalledTimes(2);
    give(run(1));
    expect(store.runs.has("ab")).toBe(true);
  });
});
