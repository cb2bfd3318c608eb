import fc from "fast-check";
import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { describe, expect, it } from "vitest";
import { accepts, decodeFrame, float32Body, FrameError, FrameType, PREFIX_BYTES, VERSION } from "./frames";
import { encodeFrame } from "./testFrames";

const VECTORS = resolve(import.meta.dirname, "../../../tests/fixtures/wire");

interface Vectors {
  readonly valid: readonly {
    readonly file: string;
    readonly type: number;
    readonly header: Record<string, unknown>;
    readonly bodyHex: string;
    /** Whether another implementation writes the same bytes (integers beyond 2^53 and floats like 1.0 differ here). */
    readonly canonical: boolean;
  }[];
  readonly invalid: readonly { readonly file: string; readonly why: string }[];
  /** What steps.bin carries, [metric][rank][step], null where it is NaN. */
  readonly stepsBody: readonly (readonly (readonly (number | null)[])[])[];
}

const bytesOf = (file: string): Uint8Array => new Uint8Array(readFileSync(resolve(VECTORS, file)));
const vectors = JSON.parse(readFileSync(resolve(VECTORS, "vectors.json"), "utf8")) as Vectors;

describe("golden vectors", () => {
  it.each(vectors.valid)("$file decodes to what Python wrote", ({ file, type, header, bodyHex }) => {
    const frame = decodeFrame(bytesOf(file));
    expect(frame.type).toBe(type);
    expect(frame.header).toEqual(header);
    expect(Buffer.from(frame.body).toString("hex")).toBe(bodyHex);
  });

  it.each(vectors.valid.filter(({ canonical }) => canonical))("$file is what we write", ({ file }) => {
    const bytes = bytesOf(file);
    const { type, header, body } = decodeFrame(bytes);
    expect(encodeFrame(type, header, body)).toEqual(bytes);
  });

  it("are read by the next minor release, and by the one after it no more", () => {
    for (const { file, type } of vectors.valid) {
      expect(decodeFrame(bytesOf(file), VERSION + 1).type).toBe(type);
      expect(() => decodeFrame(bytesOf(file), VERSION + 2)).toThrow(FrameError);
    }
  });

  it.each(vectors.invalid)("$file is refused: $why", ({ file }) => {
    expect(() => decodeFrame(bytesOf(file))).toThrow(FrameError);
  });

  it("carry steps by metric, rank and step", () => {
    const floats = [...float32Body(decodeFrame(bytesOf("steps.bin")))];
    expect(floats).toEqual(vectors.stepsBody.flat(2).map((value) => value ?? Number.NaN));
  });
});

describe("accepts", () => {
  it.each([
    [1, 1, true],
    [0, 1, false],
    [2, 1, false],
    [1, 2, true],
    [1, 3, false],
    [Number.NaN, 2, false],
  ])("version %s by a page that speaks %s: %s", (version, newest, read) => {
    expect(accepts(version, newest)).toBe(read);
  });
});

describe("decodeFrame", () => {
  const frame = encodeFrame(FrameType.STEPS, { attempt: 1, steps: [4, 5] }, new Uint8Array([1, 2, 3, 4]));

  it("gives a view on the body, aligned to 8 bytes", () => {
    const { body } = decodeFrame(frame);
    expect(body.buffer).toBe(frame.buffer);
    expect(body.byteOffset % 8).toBe(0);
  });

  it("returns what was encoded", () => {
    const header = fc.dictionary(
      fc.string(),
      fc.oneof(fc.integer(), fc.string(), fc.boolean(), fc.constant(null)),
    );
    fc.assert(
      fc.property(
        fc.integer({ min: 0, max: 255 }),
        header,
        fc.uint8Array({ maxLength: 64 }),
        (type, head, body) => {
          fc.pre(!Object.hasOwn(head, "__proto__"));
          const decoded = decodeFrame(encodeFrame(type, head, body));
          expect(decoded.type).toBe(type);
          expect({ ...decoded.header }).toEqual({ ...head });
          expect([...decoded.body]).toEqual([...body]);
        },
      ),
    );
  });

  it("refuses every cut frame", () => {
    for (let size = 0; size < frame.length; size += 1) {
      expect(() => decodeFrame(frame.slice(0, size))).toThrow(FrameError);
    }
  });

  it("either decodes or refuses a garbled frame, and never fails otherwise", () => {
    fc.assert(
      fc.property(fc.nat(frame.length - 1), fc.integer({ min: 0, max: 255 }), (at, value) => {
        const garbled = frame.slice();
        garbled[at] = value;
        try {
          decodeFrame(garbled);
        } catch (error) {
          expect(error).toBeInstanceOf(FrameError);
        }
      }),
    );
  });

  it("refuses another version and says what to do", () => {
    const other = frame.slice();
    other[4] = 9;
    expect(() => decodeFrame(other)).toThrow(/version 9 is not 1; reload/);
  });

  it("refuses a header that is no map", () => {
    const bytes = encodeFrame(3, {});
    bytes[PREFIX_BYTES] = 0x90; // an empty array
    expect(() => decodeFrame(bytes)).toThrow(/map with text keys/);
  });
});

describe("float32Body", () => {
  it("reads little endian floats, missing ones as NaN", () => {
    const body = new Uint8Array(new Float32Array([1.5, Number.NaN, -2]).buffer);
    expect([...float32Body(decodeFrame(encodeFrame(17, {}, body)))]).toEqual([1.5, Number.NaN, -2]);
  });

  it("refuses a body that is no array of floats", () => {
    expect(() => float32Body(decodeFrame(encodeFrame(17, {}, new Uint8Array(5))))).toThrow(FrameError);
  });
});
