/** Frames as a hub writes them, for tests. */
import { encodeFrame } from "../wire/testFrames";
import type { Code } from "./tensors/tensors";

export interface Given {
  readonly n: string;
  readonly c: Code;
  readonly s: readonly number[];
  readonly values: ArrayBufferView;
  readonly scales?: Float32Array;
}

const bytesOf = ({ buffer, byteOffset, byteLength }: ArrayBufferView): Uint8Array =>
  new Uint8Array(buffer as ArrayBuffer, byteOffset, byteLength);

/** One frame with its tensors in its body, each at a multiple of 8. */
export function scopeFrame(type: number, header: object, given: readonly Given[] = []): Uint8Array {
  const parts: Uint8Array[] = [];
  let end = 0;
  const place = (view: ArrayBufferView): number => {
    const at = end;
    const padded = new Uint8Array(Math.ceil(view.byteLength / 8) * 8);
    padded.set(bytesOf(view));
    parts.push(padded);
    end += padded.length;
    return at;
  };
  const tensors = given.map(({ n, c, s, values, scales }) => {
    const o = place(values);
    return { n, c, s, o, ...(scales ? { so: place(scales) } : {}) };
  });
  const body = new Uint8Array(end);
  parts.reduce((at, part) => (body.set(part, at), at + part.length), 0);
  return encodeFrame(type, { ...header, tensors }, body);
}
