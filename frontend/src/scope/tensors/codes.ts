/**
 * Codes of numbers in frames, as `megatronapp_common.scope.codes` defines them: the same 32-bit floats come out, and the
 * same bytes go in. Golden vectors: tests/fixtures/scope/codes.json.
 */
import type { Raw } from "./tensors";

export type NumberCode = "i8" | "u8s" | "u8" | "f16" | "f32";

/** Numbers of one code; `scales` has one for each row of the last axis, with `i8` only. */
export interface Encoded {
  readonly data: Raw;
  readonly scales: Float32Array | null;
}

/** Arrays that are not of the code they claim. */
export class CodeError extends Error {
  override readonly name = "CodeError";
}

const STEPS = 126;
const LEAST_SCALE = 2 ** -126;
const { fround } = Math;

/** What each byte stands for, -128 to 127 as 0x80 to 0x7f. */
function byteTable(worth: (byte: number) => number): Float32Array {
  return Float32Array.from({ length: 256 }, (_, byte) => worth(byte));
}

const SPECIAL: ReadonlyMap<number, number> = new Map([
  [-128, Number.NaN],
  [-127, -Infinity],
  [127, Infinity],
]);
const signed = (byte: number): number => (byte << 24) >> 24;
const STEPS_OF = byteTable((byte) => SPECIAL.get(signed(byte)) ?? signed(byte));
const LINEAR = byteTable((byte) => byte / 255);
const ROOT = byteTable((byte) => fround(byte / 255) ** 2);

let halves: Float32Array | null = null;

function halfWorth(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction === 0 ? sign * Infinity : Number.NaN;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

/** What each of the 65,536 half-precision numbers is; 256 KiB, made when the first is read. */
function halfTable(): Float32Array {
  halves ??= Float32Array.from({ length: 65536 }, (_, bits) => halfWorth(bits));
  return halves;
}

function look(table: Float32Array, data: Raw, mask: number): Float32Array {
  const out = new Float32Array(data.length);
  for (let index = 0; index < data.length; index += 1) {
    out[index] = table[(data[index] ?? 0) & mask] ?? Number.NaN;
  }
  return out;
}

function decodeSigned(data: Raw, scales: Float32Array | null): Float32Array {
  const width = scales && scales.length > 0 ? data.length / scales.length : 0;
  if (!scales || !Number.isInteger(width) || (width === 0 && data.length > 0))
    throw new CodeError(
      `${data.length} numbers of i8 need one scale for each row, got ${scales?.length ?? 0}`,
    );
  const out = look(STEPS_OF, data, 0xff);
  for (let index = 0; index < out.length; index += 1) {
    out[index] = (out[index] ?? 0) * (scales[Math.floor(index / width)] ?? Number.NaN);
  }
  return out;
}

/** The numbers that stand there. `f32` is given as it is, not copied. Throws CodeError. */
export function decodeNumbers(code: NumberCode, data: Raw, scales: Float32Array | null = null): Float32Array {
  switch (code) {
    case "i8":
      return decodeSigned(data, scales);
    case "u8s":
      return look(ROOT, data, 0xff);
    case "u8":
      return look(LINEAR, data, 0xff);
    case "f16":
      return look(halfTable(), data, 0xffff);
    case "f32":
      if (data instanceof Float32Array) return data;
      throw new CodeError("code f32 holds 32-bit floats");
  }
}

/** To the nearest whole number, of two the even one. */
function nearest(value: number): number {
  const low = Math.floor(value);
  const rest = value - low;
  if (rest !== 0.5) return rest < 0.5 ? low : low + 1;
  return low % 2 === 0 ? low : low + 1;
}

const clamped = (value: number): number => (Number.isNaN(value) ? 0 : Math.min(1, Math.max(0, value)));

/** Bits of the nearest half-precision number. */
function toHalf(value: number): number {
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0;
  const size = Math.abs(value);
  if (Number.isNaN(size)) return 0x7e00;
  if (size >= 65520) return sign | 0x7c00;
  const exponent = Math.max(-14, Math.floor(Math.log2(Math.max(size, Number.MIN_VALUE))));
  // Rounding up to the next power of two carries into the exponent by itself.
  const steps = nearest(size / 2 ** (exponent - 10));
  return sign | (((exponent + 14) << 10) + steps);
}

function encodeSigned(values: Float32Array, width: number): Encoded {
  const scales = new Float32Array(width > 0 ? values.length / width : 0);
  const data = new Int8Array(values.length);
  for (let row = 0; row < scales.length; row += 1) {
    const numbers = values.subarray(row * width, (row + 1) * width);
    const largest = numbers.reduce(
      (most, value) => (Number.isFinite(value) ? Math.max(most, Math.abs(value)) : most),
      0,
    );
    const scale = Math.max(fround(largest / STEPS), LEAST_SCALE);
    scales[row] = scale;
    numbers.forEach((value, index) => {
      const steps = Math.min(127, Math.max(-127, nearest(fround(value / scale))));
      data[row * width + index] = Number.isNaN(value) ? -128 : steps;
    });
  }
  return { data, scales };
}

/** The numbers in a code; `width` is the length of a row, for `i8`. Pages only read: this is for tests. */
export function encodeNumbers(code: NumberCode, values: Float32Array, width = values.length): Encoded {
  switch (code) {
    case "i8":
      return encodeSigned(values, width);
    case "u8s":
      return {
        data: Uint8Array.from(values, (value) => nearest(fround(255 * fround(Math.sqrt(clamped(value)))))),
        scales: null,
      };
    case "u8":
      return {
        data: Uint8Array.from(values, (value) => nearest(fround(255 * clamped(value)))),
        scales: null,
      };
    case "f16":
      return { data: Uint16Array.from(values, toHalf), scales: null };
    case "f32":
      return { data: values.slice(), scales: null };
  }
}
