/**
 * Wire frames, as `megatronapp_common.frames` defines them: a 16-byte prefix, a msgpack header padded to 8 bytes, and a
 * body that starts at a multiple of 8, so that typed arrays are views on it.
 */
import { decode as unpack } from "@msgpack/msgpack";

export const VERSION = 1;
export const PREFIX_BYTES = 16;
export const MAX_FRAME_BYTES = 64 << 20;

export const FrameType = {
  HELLO: 1,
  WELCOME: 2,
  RING: 3,
  RECORDS: 4,
  STATUS: 5,
  BYE: 6,
  COMMAND: 7,
  SNAPSHOT: 16,
  STEPS: 17,
  METRICS: 18,
  VERDICTS: 19,
  ERROR: 31,
} as const;

export type Header = Record<string, unknown>;

/** One decoded frame; `type` is a plain number so that a newer hub's types can be skipped. */
export interface Frame {
  readonly type: number;
  readonly header: Header;
  readonly body: Uint8Array;
}

/** Bytes that are not a frame. */
export class FrameError extends Error {
  override readonly name = "FrameError";
}

export const padded = (length: number): number => (length + 7) & ~7;

/**
 * Whether a page that speaks `newest` reads this version: that, and the one before, which the minor release before
 * speaks (`megatronapp_common.frames.accepts`). In an upgrade a page of the new gateway listens to older hubs.
 */
export const accepts = (version: number, newest = VERSION): boolean =>
  version >= Math.max(1, newest - 1) && version <= newest;

/** The one frame in `data`; its body is a view, not a copy. Throws FrameError. */
export function decodeFrame(data: Uint8Array, newest = VERSION): Frame {
  if (data.length < PREFIX_BYTES)
    throw new FrameError(`a frame starts with ${PREFIX_BYTES} bytes, got ${data.length}`);
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  const version = view.getUint8(4);
  if (!accepts(version, newest))
    throw new FrameError(`frame version ${version} is not ${newest}; reload the page`);
  const total = view.getUint32(0, true);
  const headLength = view.getUint32(8, true);
  const bodyLength = view.getUint32(12, true);
  const start = PREFIX_BYTES + Math.ceil(headLength / 8) * 8;
  if (total !== start + Math.ceil(bodyLength / 8) * 8 || total > MAX_FRAME_BYTES) {
    throw new FrameError(`frame lengths disagree: total ${total}, header ${headLength}, body ${bodyLength}`);
  }
  if (total !== data.length) throw new FrameError(`frame says ${total} bytes, got ${data.length}`);
  const header = decodeHeader(data.subarray(PREFIX_BYTES, PREFIX_BYTES + headLength));
  return { type: view.getUint8(5), header, body: data.subarray(start, start + bodyLength) };
}

function decodeHeader(bytes: Uint8Array): Header {
  let header: unknown;
  try {
    header = unpack(bytes);
  } catch (error) {
    throw new FrameError(`frame header is not msgpack: ${String(error)}`);
  }
  if (typeof header !== "object" || header === null || Array.isArray(header)) {
    throw new FrameError("frame header must be a map with text keys");
  }
  return header as Header;
}

/** Float32 view on a body (copied only where the message itself was received unaligned). */
export function float32Body(frame: Frame): Float32Array {
  const { body } = frame;
  if (body.length % 4 !== 0) throw new FrameError(`a body of ${body.length} bytes holds no float32 array`);
  const aligned = body.byteOffset % 4 === 0 ? body : body.slice();
  return new Float32Array(aligned.buffer, aligned.byteOffset, aligned.length / 4);
}
