import { describe, expect, it } from "vitest";
import { decodeFrame } from "../../wire/frames";
import { FrameStore, RUN_BYTES } from "./frameStore";
import { ScopeFrame } from "../protocol";
import { SampleStore } from "./sampleStore";
import { scopeFrame, type Given } from "../testFrames";

const RUN = "0123456789ab";

const prompt = { text: "héy 👋", ids: [7, 8, 9, 10], offsets: [[0, 3], [3, 4], null, [4, 6]] };

const q = (rows: number, layers: number, width: number, first: number): Given => ({
  n: "q",
  c: "i8",
  s: [rows, layers, width],
  values: Int8Array.from({ length: rows * layers * width }, (_, index) => first + index),
  scales: Float32Array.from({ length: rows * layers }, (_, index) => 0.5 + index),
});

function filled(...frames: Uint8Array[]): FrameStore {
  const store = new FrameStore();
  for (const frame of frames) store.take(decodeFrame(frame));
  return store;
}

const begun = scopeFrame(ScopeFrame.RUN, { seq: 1, run: RUN, state: "decoding", prompts: [prompt] });

const step = (number: number, position: number, given: Given[] = [], text = " a"): Uint8Array =>
  scopeFrame(
    ScopeFrame.STEP,
    {
      seq: number + 2,
      run: RUN,
      step: number,
      rows: [[0, position]],
      ids: [100 + number],
      texts: [text],
      offsets: [null],
    },
    given,
  );

const sampleOf = (store: FrameStore): SampleStore => store.runs.get(RUN)?.samples[0] ?? new SampleStore();

const firsts = (sample: SampleStore, positions: readonly number[]): (number | undefined)[] =>
  positions.map((position) => sample.row("q", position)?.data[0]);

describe("FrameStore", () => {
  it("puts tokens after the row that they came out of, and what was looked at on the row", () => {
    const given: Given[] = [q(1, 2, 3, 1), { n: "surprise", c: "f32", s: [1], values: Float32Array.of(2.5) }];
    const sample = sampleOf(filled(begun, step(0, 3, given)));
    expect(sample.ids).toEqual([7, 8, 9, 10, 100]);
    expect([...(sample.row("q", 3)?.data ?? [])]).toEqual([1, 2, 3, 4, 5, 6]);
    expect([...(sample.row("q", 3)?.scales ?? [])]).toEqual([0.5, 1.5]);
    expect(sample.row("q", 4)).toBeUndefined();
    expect([...(sample.row("surprise", 4)?.data ?? [])]).toEqual([2.5]);
  });

  it("reads an overview at its positions, or at every stride-th", () => {
    const overview = (positions: object): Uint8Array =>
      scopeFrame(ScopeFrame.OVERVIEW, { seq: 2, run: RUN, sample: 0, stride: 2, ...positions }, [
        q(3, 1, 1, 5),
        { n: "atlas", c: "u8s", s: [1, 2, 8, 8], values: new Uint8Array(128).fill(9) },
      ]);
    const told = sampleOf(filled(begun, overview({ positions: [0, 2, 3] })));
    expect(firsts(told, [0, 1, 2, 3])).toEqual([5, undefined, 6, 7]);
    expect(told.atlas).toMatchObject({ layers: 1, heads: 2, edge: 8 });
    const counted = sampleOf(filled(begun, overview({})));
    expect(firsts(counted, [0, 1, 2, 3, 4])).toEqual([5, undefined, 6, undefined, 7]);
  });

  it("cuts rows of pinned heads apart by their numbers of keys", () => {
    const rows = scopeFrame(
      ScopeFrame.ROWS,
      {
        seq: 3,
        run: RUN,
        step: 1,
        rows: [
          [0, 1, 2, 4],
          [0, 3, 0, 4],
        ],
        keys: [2, 3],
      },
      [{ n: "attention", c: "u8s", s: [5], values: Uint8Array.of(1, 2, 3, 4, 5) }],
    );
    const sample = sampleOf(filled(begun, rows));
    expect(sample.attentionRow(1, 2, 4)).toEqual(Uint8Array.of(1, 2));
    expect(sample.attentionRow(3, 0, 4)).toEqual(Uint8Array.of(3, 4, 5));
    expect(sample.attentionRow(3, 1, 4)).toBeUndefined();
  });

  it("keeps the newest numbers within its budget and every token", () => {
    const store = filled(begun);
    const wide = q(1, 8, 8192, 0);
    const steps = Math.ceil((RUN_BYTES / (8 * 8192)) * 1.5);
    for (let index = 0; index < steps; index += 1) store.take(decodeFrame(step(index, 3 + index, [wide])));
    const sample = sampleOf(store);
    expect(sample.bytes).toBeLessThanOrEqual(RUN_BYTES);
    expect(sample.row("q", 3)).toBeUndefined();
    expect(sample.row("q", 2 + steps)).toBeDefined();
    expect(sample.length).toBe(4 + steps);
  });

  it("never lets the run go that is shown, and knows whose numbers went", () => {
    const store = filled(begun);
    store.selected = RUN;
    const of = (run: string): Uint8Array => scopeFrame(ScopeFrame.RUN, { seq: 1, run, state: "decoding" });
    for (const run of ["b", "c", "d"]) store.take(decodeFrame(of(run)));
    expect([...store.runs.keys()]).toEqual([RUN, "d"]);
    expect([...store.forgotten]).toEqual(["b", "c"]);
    store.take(decodeFrame(of("b")));
    expect([...store.runs.keys()]).toEqual([RUN, "b"]);
    expect([...store.forgotten]).toEqual(["c", "d"]);
  });

  it("asks for all of a run that it knows the end of only, and else for what is new", () => {
    const store = filled(begun, step(0, 3));
    expect([store.resumeAt(RUN), store.resumeAt("other")]).toEqual([2, 0]);
    const late = filled(step(7, 10));
    expect([late.resumeAt(RUN), late.resumeAt(RUN)]).toEqual([0, 9]);
  });

  it("knows texts of candidates by their id", () => {
    const header = { seq: 2, run: RUN, step: 0, rows: [[0, 3]], ids: [5], texts: ["x"], offsets: [null] };
    const top = { n: "top.id", c: "u32", s: [1, 2], values: Uint32Array.of(5, 9) } as const;
    const store = filled(begun, scopeFrame(ScopeFrame.STEP, { ...header, topTexts: [["x", " y"]] }, [top]));
    expect([...(store.runs.get(RUN)?.candidates ?? [])]).toEqual([
      [5, "x"],
      [9, " y"],
    ]);
  });

  it("knows the newest number of a run's frames and keeps gaps", () => {
    const gap = scopeFrame(ScopeFrame.GAP, {
      seq: 9,
      run: RUN,
      what: "step",
      from: 1,
      to: 3,
      ranks: [1],
      reason: "late",
    });
    const run = filled(begun, gap).runs.get(RUN);
    expect(run?.seq).toBe(9);
    expect(run?.gaps).toMatchObject([{ what: "step", ranks: [1] }]);
  });
});
