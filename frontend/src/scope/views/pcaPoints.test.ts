import { describe, expect, it } from "vitest";
import { decodeFrame } from "../../wire/frames";
import { FrameStore } from "../store/frameStore";
import { explainedShares, pcaPoints, type Point } from "./pcaPoints";
import { ScopeFrame } from "../protocol";
import { scopeFrame, type Given } from "../testFrames";

const RUN = "0123456789ab";
const begun = scopeFrame(ScopeFrame.RUN, {
  seq: 1,
  run: RUN,
  state: "decoding",
  prompts: [
    {
      text: "abcd",
      ids: [7, 8, 9, 10],
      offsets: [
        [0, 1],
        [1, 2],
        [2, 3],
        [3, 4],
      ],
    },
  ],
});

function filled(...frames: Uint8Array[]): FrameStore {
  const store = new FrameStore();
  for (const frame of frames) store.take(decodeFrame(frame));
  return store;
}

describe("coordinates", () => {
  const points = (rows: number, value: number): Given => ({
    n: "pca",
    c: "f32",
    s: [rows, 1, 8],
    values: new Float32Array(rows * 8).fill(value),
  });
  const basis = (version: number, value: number, positions: number[]): Uint8Array =>
    scopeFrame(
      ScopeFrame.PCA,
      {
        run: RUN,
        version,
        layers: [0],
        explained: [[1]],
        fitted: version === 1 ? "first prompt" : "refit",
        rows: positions.map((at) => [0, at]),
      },
      [points(positions.length, value)],
    );
  const stepOf = (position: number, value: number, pcaVersion?: number): Uint8Array =>
    scopeFrame(
      ScopeFrame.STEP,
      {
        seq: position,
        run: RUN,
        step: position,
        rows: [[0, position]],
        ids: [1],
        texts: ["x"],
        offsets: [null],
        ...(pcaVersion === undefined ? {} : { pcaVersion }),
      },
      [points(1, value)],
    );
  const shown = (...frames: Uint8Array[]): [number, number][] => {
    const run = filled(begun, ...frames).runs.get(RUN);
    return run ? pcaPoints(run, 0).map(({ position, coordinates }) => [position, coordinates[0] ?? 0]) : [];
  };

  it("of another basis than the newest are never in the picture", () => {
    const before = [basis(1, 10, [0, 1]), stepOf(3, 11, 1), stepOf(4, 12, 1)];
    expect(shown(...before)).toEqual([
      [0, 10],
      [1, 10],
      [3, 11],
      [4, 12],
    ]);
    const refitted = [...before, basis(2, 20, [0, 1, 3]), stepOf(5, 13, 1), stepOf(6, 21, 2)];
    expect(shown(...refitted)).toEqual([
      [0, 20],
      [1, 20],
      [3, 20],
      [6, 21],
    ]);
    expect(shown(...refitted, basis(1, 10, [0, 1]))).toEqual(shown(...refitted));
  });

  it("of one basis may come in several frames", () => {
    expect(shown(basis(2, 20, [0, 1]), basis(2, 20, [2, 3]))).toEqual([
      [0, 20],
      [1, 20],
      [2, 20],
      [3, 20],
    ]);
  });

  it("wait for their basis, and without a version count only while there was one", () => {
    expect(shown(stepOf(3, 11, 1))).toEqual([]);
    expect(shown(stepOf(3, 11, 1), basis(1, 10, [0]))).toEqual([
      [0, 10],
      [3, 11],
    ]);
    expect(shown(basis(1, 10, [0]), stepOf(3, 11))).toEqual([
      [0, 10],
      [3, 11],
    ]);
    expect(shown(basis(2, 20, [0]), stepOf(3, 11))).toEqual([[0, 20]]);
  });
});

describe("explained variance", () => {
  const point = (position: number, first: number, second: number): Point => ({
    sample: 0,
    position,
    coordinates: Float32Array.from([first, second, 0, 0, 0, 0, 0, 0]),
  });

  it("is the variance of the points that are shown, around their own mean", () => {
    const shares = explainedShares([point(0, 10, 1), point(1, 14, 1), point(2, 10, 4), point(3, 14, 4)], 10);
    expect(shares?.slice(0, 3)).toEqual([0.4, 0.225, 0]);
  });

  it("leaves points out that have no coordinates, and is none of one point", () => {
    const shares = explainedShares([point(0, 1, 0), point(1, 3, 0), point(2, Number.NaN, 0)], 4);
    expect(shares?.[0]).toBe(0.25);
    expect(explainedShares([point(0, 1, 0)], 4)).toBeNull();
    expect(explainedShares([point(0, 1, 0), point(1, 3, 0)], 0)).toBeNull();
  });
});
