import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { decodeFrame, FrameError } from "../../wire/frames";
import { ScopeFrame } from "../protocol";
import { readTensors } from "./tensors";
import { scopeFrame, type Given } from "../testFrames";

const RUN = "0123456789ab";

const q = (rows: number, layers: number, width: number, first: number): Given => ({
  n: "q",
  c: "i8",
  s: [rows, layers, width],
  values: Int8Array.from({ length: rows * layers * width }, (_, index) => first + index),
  scales: Float32Array.from({ length: rows * layers }, (_, index) => 0.5 + index),
});

describe("readTensors", () => {
  const bytes = scopeFrame(ScopeFrame.STEP, { run: RUN }, [q(2, 3, 4, 1)]);

  it("gives views with their scales, without a copy", () => {
    const frame = decodeFrame(bytes);
    const tensor = readTensors(frame).get("q");
    expect(tensor?.shape).toEqual([2, 3, 4]);
    expect([...(tensor?.data ?? [])].slice(0, 4)).toEqual([1, 2, 3, 4]);
    expect([...(tensor?.scales ?? [])]).toEqual([0.5, 1.5, 2.5, 3.5, 4.5, 5.5]);
    expect(tensor?.data.buffer).toBe(frame.body.buffer);
  });

  it.each([
    ["beyond the body", { n: "q", c: "f32", s: [1000], o: 0 }],
    ["at an odd offset", { n: "q", c: "f32", s: [1], o: 4 }],
    ["before the body", { n: "q", c: "f32", s: [1], o: -8 }],
    ["without scales", { n: "q", c: "i8", s: [1, 1], o: 0 }],
    ["of a negative shape", { n: "q", c: "u8", s: [-1], o: 0 }],
    ["without a name", { c: "u8", s: [1], o: 0 }],
  ])("refuses a tensor %s", (_, entry) => {
    const frame = { ...decodeFrame(bytes), header: { tensors: [entry] } };
    expect(() => readTensors(frame)).toThrow(FrameError);
  });

  it("skips codes of a newer hub", () => {
    const frame = { ...decodeFrame(bytes), header: { tensors: [{ n: "q", c: "f8", s: [1], o: 0 }] } };
    expect(readTensors(frame).size).toBe(0);
  });

  it("never hangs or throws anything else, whatever stands in the header", () => {
    const frame = decodeFrame(bytes);
    const entry = fc.record(
      { n: fc.string(), c: fc.constantFrom("i8", "f32", "u8s"), s: fc.array(fc.integer()), o: fc.integer() },
      { requiredKeys: [] },
    );
    fc.assert(
      fc.property(fc.oneof(fc.anything(), fc.array(entry)), (tensors) => {
        try {
          readTensors({ ...frame, header: { tensors } });
        } catch (error) {
          expect(error).toBeInstanceOf(FrameError);
        }
      }),
    );
  });
});
