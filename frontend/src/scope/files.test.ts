import { describe, expect, it } from "vitest";
import { ApiError } from "../api/client";
import { csvText, npyBytes } from "./npy";
import { placeAt, problemPlaces } from "./problems";

describe("files", () => {
  it("are NumPy's, aligned to 64 bytes", () => {
    const bytes = npyBytes(Float32Array.of(1, 2, 3, 4, 5, 6), [2, 3]);
    const length = new DataView(bytes.buffer).getUint16(8, true);
    expect((10 + length) % 64).toBe(0);
    const header = new TextDecoder().decode(bytes.subarray(10, 10 + length));
    expect(header).toContain("'shape': (2, 3), }");
    expect(header.endsWith("\n")).toBe(true);
    expect([...new Float32Array(bytes.slice(10 + length).buffer)]).toEqual([1, 2, 3, 4, 5, 6]);
    expect(new TextDecoder().decode(npyBytes(Float32Array.of(1), [1]))).toContain("(1,), }");
  });

  it("quote cells that need it", () => {
    expect(
      csvText([
        ["a", 'say "b", c'],
        [1, 0.5],
      ]),
    ).toBe('a,"say ""b"", c"\r\n1,0.5\r\n');
  });
});

describe("what the hub refuses", () => {
  it("is found at its field and column, however it is told", () => {
    const told = new ApiError(422, "no", "", {
      places: [{ place: "capture.expression.qkv", column: 6, message: "there is no median" }],
    });
    expect(placeAt(problemPlaces(told), "capture.expression.qkv")).toMatchObject({ column: 6 });
    const spoken = new ApiError(422, "body.capture.expression.mlp: Value error, column 3: write abs", "");
    expect(placeAt(problemPlaces(spoken), "capture.expression.mlp")).toMatchObject({ column: 3 });
    expect(problemPlaces(new ApiError(409, "x: y", ""))).toEqual([]);
  });
});
