import { describe, expect, it } from "vitest";
import { csvText, npyBytes } from "./npy";

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
