/** Tensors of a frame: typed views on its body, as `header.tensors` describes them. */
import { FrameError, type Frame } from "../../wire/frames";

const KINDS = {
  i8: Int8Array,
  u8: Uint8Array,
  u8s: Uint8Array,
  f16: Uint16Array,
  f32: Float32Array,
  u32: Uint32Array,
  i32: Int32Array,
} as const;

export type Code = keyof typeof KINDS;
export type Raw = Int8Array | Uint8Array | Uint16Array | Float32Array | Uint32Array | Int32Array;

/** Numbers as they were sent: of `f16` the bits, of `i8` with one scale for each row. */
export interface Tensor {
  readonly name: string;
  readonly code: Code;
  readonly shape: readonly number[];
  readonly data: Raw;
  readonly scales: Float32Array | null;
}

interface Described {
  readonly n: string;
  readonly c: string;
  readonly s: readonly number[];
  readonly o: number;
  readonly so?: number;
}

const product = (shape: readonly number[]): number => shape.reduce((size, part) => size * part, 1);

export const isCode = (name: string): name is Code => name in KINDS;

/** An array of `length` zeros for numbers of `code`. */
export const emptyRaw = (code: Code, length: number): Raw => new KINDS[code](length);

function view(body: Uint8Array, code: Code, at: number, length: number, name: string): Raw {
  const Kind = KINDS[code];
  const bytes = length * Kind.BYTES_PER_ELEMENT;
  if (!Number.isInteger(at) || at < 0 || at % 8 !== 0)
    throw new FrameError(`tensor ${name} begins at ${at}; offsets are multiples of 8`);
  if (at + bytes > body.length)
    throw new FrameError(`tensor ${name} ends at byte ${at + bytes} of ${body.length}`);
  const aligned = body.byteOffset % 8 === 0 ? body : body.slice();
  return new Kind(aligned.buffer as ArrayBuffer, aligned.byteOffset + at, length);
}

function described(entry: unknown): Described {
  const { n, c, s, o } = (entry ?? {}) as Partial<Described>;
  const known = typeof n === "string" && typeof c === "string" && typeof o === "number" && Array.isArray(s);
  if (!known || !s.every((part) => Number.isInteger(part) && part >= 0))
    throw new FrameError("a tensor needs a name, a code, a shape and an offset");
  return entry as Described;
}

/** All tensors of a frame by name; those of a code that this page does not know are skipped. Throws FrameError. */
export function readTensors(frame: Frame): ReadonlyMap<string, Tensor> {
  const list = frame.header["tensors"] ?? [];
  if (!Array.isArray(list)) throw new FrameError("tensors must be a list");
  const found = new Map<string, Tensor>();
  for (const entry of list) {
    const { n, c, s, o, so } = described(entry);
    if (!isCode(c)) continue;
    const data = view(frame.body, c, o, product(s), n);
    const scales =
      c === "i8" ? (view(frame.body, "f32", so ?? -1, product(s.slice(0, -1)), n) as Float32Array) : null;
    found.set(n, { name: n, code: c, shape: s, data, scales });
  }
  return found;
}
