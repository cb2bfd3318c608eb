import { expect, it } from "vitest";
import { decodeFrame } from "../../wire/frames";
import { ScopeFrame } from "../protocol";
import { scopeFrame, type Given } from "../testFrames";
import { recordedLens } from "./recordedLens";

it("a lens that follows a token answers a request without one", () => {
  const header = { kind: "lens", sample: 0, rows: [2, 4], layers: [0], tokens: [5], texts: ["x"], token: 5 };
  const tensor = (n: string, values: ArrayBufferView, ...more: number[]): Given => ({
    n,
    c: n.includes("rank") ? "i32" : "f32",
    s: [1, 2, ...more],
    values,
  });
  const frame = scopeFrame(ScopeFrame.ANALYSIS, header, [
    { n: "lens.id", c: "u32", s: [1, 2, 1], values: Uint32Array.of(5, 6) },
    tensor("lens.logprob", Float32Array.of(-1, -2), 1),
    tensor("lens.entropy", Float32Array.of(0.5, 0.25)),
    tensor("lens.target.rank", Int32Array.of(0, -1)),
    tensor("lens.target.logprob", Float32Array.of(-1, Number.NaN)),
    tensor("lens.token.rank", Int32Array.of(0, 3)),
    tensor("lens.token.logprob", Float32Array.of(-1, -4)),
  ]);
  const frames = [decodeFrame(frame)];
  const wish = { sample: 0, first: 3, end: 4, token: null };
  const plain = recordedLens(frames, wish);
  expect([plain?.positions, plain?.entropy, plain?.token, plain?.tokenRank]).toEqual([
    [3],
    [[0.25]],
    null,
    null,
  ]);
  expect(recordedLens(frames, { ...wish, token: 5 })?.tokenRank).toEqual([[3]]);
  expect(recordedLens(frames, { ...wish, token: 6 })).toBeNull();
});
