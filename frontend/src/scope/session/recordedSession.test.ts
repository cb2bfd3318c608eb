import { describe, expect, it } from "vitest";
import { ApiError } from "../../api/client";
import { ScopeFrame } from "../protocol";
import { scopeFrame } from "../testFrames";
import { RecordedClient } from "./recordedClient";
import { readSession } from "./recordedSession";

const RUN = "0123456789ab";
const HELLO = scopeFrame(ScopeFrame.HELLO, {
  job: "tiny",
  source: "live",
  role: "controller",
  model: { layers: 1 },
});
const PROMPT = { text: "abc", ids: [1, 2, 3], offsets: [[0, 1], [1, 2], [2, 3]] }; // prettier-ignore
const STATE = scopeFrame(ScopeFrame.RUN, { run: RUN, seq: 1, state: "done", prompts: [PROMPT] });
const ROWS = Float32Array.of(1, 0, 0, 0.25, 0.75, 0, 0.25, 0.25, 0.5);
const VALUES = scopeFrame(
  ScopeFrame.VALUES,
  { run: RUN, site: "attention", sample: 0, layer: 0, head: 1, rows: [0, 3] },
  [{ n: "attention", c: "f32", s: [3, 3], values: ROWS }],
);
const joined = (...parts: readonly Uint8Array[]): Uint8Array =>
  Uint8Array.from(parts.flatMap((part) => [...part]));
const place = { run: RUN, sample: 0, layer: 0, head: 1 };

describe("a session file", () => {
  it("shows its run, and tiles of attention that it holds, at any level", async () => {
    const session = readSession(joined(HELLO, STATE, VALUES));
    expect([session.run, session.hello.role, session.broken]).toEqual([RUN, "viewer", null]);
    const client = new RecordedClient(session);
    const [tile] = await client.tiles({ ...place, level: 0 }, [{ query: 0, key: 0 }]);
    expect([tile?.rows, tile?.columns]).toEqual([3, 3]);
    expect([...(tile?.values ?? [])].map((value) => +((value / 255) ** 2).toFixed(2))).toEqual([...ROWS]);
    const [pooled] = await client.tiles({ ...place, level: 1 }, [{ query: 0, key: 0 }]);
    expect([...(pooled?.values ?? [])].map((value) => +((value / 255) ** 2).toFixed(2))).toEqual([
      1, 0, 0.25, 0.5,
    ]);
  });

  it("refuses what was not recorded, as a replay does", async () => {
    const client = new RecordedClient(readSession(joined(HELLO, STATE, VALUES)));
    const head = client.tiles({ ...place, head: 0, level: 0 }, [{ query: 0, key: 0 }]);
    const refused = await head.catch((error: unknown) => error);
    expect(refused).toBeInstanceOf(ApiError);
    expect((refused as ApiError).code).toBe("not-recorded");
    await expect(client.analysis("lens", RUN, { sample: 0, positions: "0-1" })).rejects.toThrow(
      "not recorded",
    );
    await expect(client.scores(RUN, 0)).rejects.toThrow("not recorded");
  });

  it("is read up to the break, and names it", () => {
    const session = readSession(joined(HELLO, STATE, VALUES.subarray(0, 40)));
    expect(session.broken).toContain(`byte ${HELLO.length + STATE.length} of`);
    expect(() => readSession(Uint8Array.of(1, 2, 3))).toThrow("This is no session of MegaScope");
    expect(() => readSession(HELLO)).toThrow("holds no run");
  });
});
