import { readFileSync } from "node:fs";
import { resolve } from "node:path";

import fc from "fast-check";
import { describe, expect, it } from "vitest";

import { CodeError, decodeNumbers, type NumberCode } from "./codes";
import { encodeNumbers } from "./testCodes";

interface Vector {
  readonly code: NumberCode;
  readonly shape: readonly number[];
  readonly values: string;
  readonly data: string;
  readonly scales: string | null;
  readonly decoded: string;
}

const FILE = resolve(import.meta.dirname, "../../../../tests/fixtures/scope/codes.json");
const vectors = JSON.parse(readFileSync(FILE, "utf8")) as Vector[];
const KINDS = {
  i8: Int8Array,
  u8s: Uint8Array,
  u8: Uint8Array,
  f16: Uint16Array,
  f32: Float32Array,
} as const;
const bytes = (hex: string): ArrayBuffer => new Uint8Array(Buffer.from(hex, "hex")).buffer;
const hexOf = (array: ArrayBufferView): string =>
  Buffer.from(array.buffer, array.byteOffset, array.byteLength).toString("hex");
const floats = (hex: string): Float32Array => new Float32Array(bytes(hex));

describe("golden vectors", () => {
  it("hold every code", () => {
    expect(vectors.map(({ code }) => code).sort()).toEqual(Object.keys(KINDS).sort());
  });

  it.each(vectors)("$code is read as Python reads it", ({ code, data, scales, decoded }) => {
    const found = decodeNumbers(code, new KINDS[code](bytes(data)), scales === null ? null : floats(scales));
    expect([...found]).toEqual([...floats(decoded)]);
  });

  it.each(vectors)("$code is written as Python writes it", ({ code, shape, values, data, scales }) => {
    const found = encodeNumbers(code, floats(values), shape.at(-1));
    if (code === "f32") expect([...found.data]).toEqual([...floats(data)]);
    else expect(hexOf(found.data)).toBe(data);
    expect(found.scales === null ? null : hexOf(found.scales)).toBe(scales);
  });
});

const numbers = fc.float32Array({ maxLength: 20 });

describe("codes", () => {
  it("of i8 are off by half a step at most, and tell what is no number", () => {
    fc.assert(
      fc.property(numbers, (values) => {
        const { data, scales } = encodeNumbers("i8", values);
        const found = decodeNumbers("i8", data, scales);
        values.forEach((value, index) => {
          const close = Math.abs((found[index] ?? 0) - value) <= 0.50001 * (scales?.[0] ?? 0);
          expect(Number.isFinite(value) ? close : Object.is(found[index], value)).toBe(true);
        });
      }),
    );
  });

  it.each([
    ["u8s", 0.00392],
    ["u8", 0.00197],
  ] as const)("%s is off by %d at most", (code, worst) => {
    const values = Float32Array.from({ length: 10001 }, (_, index) => index / 10000);
    const found = decodeNumbers(code, encodeNumbers(code, values).data);
    const errors = found.map((value, index) => Math.abs(value - (values[index] ?? 0)));
    expect(Math.max(...errors)).toBeLessThanOrEqual(worst);
    expect(Math.max(...errors)).toBeGreaterThan(0.98 * worst);
  });

  it("of half precision return every number", () => {
    const all = Uint16Array.from({ length: 65536 }, (_, bits) => bits);
    const again = encodeNumbers("f16", decodeNumbers("f16", all)).data;
    const differing = all.filter((bits, index) => again[index] !== bits && (bits & 0x7fff) <= 0x7c00);
    expect([...differing]).toEqual([]);
  });

  it.each([null, new Float32Array(0), new Float32Array(4)])("of i8 need their scales", (scales) => {
    expect(() => decodeNumbers("i8", new Int8Array(6), scales)).toThrow(CodeError);
  });

  it("of f32 are floats", () => {
    expect(() => decodeNumbers("f32", new Uint8Array(4))).toThrow(CodeError);
  });

  it("of nothing are nothing", () => {
    expect(decodeNumbers("i8", new Int8Array(0), new Float32Array(3))).toHaveLength(0);
  });
});
