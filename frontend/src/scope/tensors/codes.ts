/**
 * Codes of numbers in frames, as `megatronapp_common.scope.codes` defines them: decoding gives the same 32-bit floats.
 * Golden vectors: tests/fixtures/scope/codes.json.
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

/** Value of each byte, -128 to 127 as 0x80 to 0x7f. */
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
const ROOT = byteTable((byte) => Math.fround(byte / 255) ** 2);

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

function lookUp(table: Float32Array, data: Raw, mask: number): Float32Array {
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
  const out = lookUp(STEPS_OF, data, 0xff);
  for (let index = 0; index < out.length; index += 1) {
    out[index] = (out[index] ?? 0) * (scales[Math.floor(index / width)] ?? Number.NaN);
  }
  return out;
}

/** Decodes numbers. `f32` is returned as it is, not copied. Throws CodeError. */
export function decodeNumbers(code: NumberCode, data: Raw, scales: Float32Array | null = null): Float32Array {
  switch (code) {
    case "i8":
      return decodeSigned(data, scales);
    case "u8s":
      return lookUp(ROOT, data, 0xff);
    case "u8":
      return lookUp(LINEAR, data, 0xff);
    case "f16":
      return lookUp(halfTable(), data, 0xffff);
    case "f32":
      if (data instanceof Float32Array) return data;
      throw new CodeError("code f32 holds 32-bit floats");
  }
}
