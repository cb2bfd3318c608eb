/** Numbers in the codes of frames, as the hub encodes them, for tests. */
import type { Encoded, NumberCode } from "./codes";

const STEPS = 126;
const LEAST_SCALE = 2 ** -126;
const { fround } = Math;

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

/** The numbers in a code; `width` is the length of a row, for `i8`. */
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
