/** Frames as a hub encodes them, for tests. */
import { encode as pack } from "@msgpack/msgpack";
import { FrameError, MAX_FRAME_BYTES, padded, PREFIX_BYTES, VERSION, type Header } from "./frames";

/** Bytes of one frame; throws FrameError past MAX_FRAME_BYTES. */
export function encodeFrame(type: number, header: Header, body: Uint8Array = new Uint8Array()): Uint8Array {
  const head = pack(header);
  const total = PREFIX_BYTES + padded(head.length) + padded(body.length);
  if (total > MAX_FRAME_BYTES) throw new FrameError(`frame of ${total} bytes passes ${MAX_FRAME_BYTES}`);
  const out = new Uint8Array(total);
  const view = new DataView(out.buffer);
  view.setUint32(0, total, true);
  view.setUint8(4, VERSION);
  view.setUint8(5, type);
  view.setUint32(8, head.length, true);
  view.setUint32(12, body.length, true);
  out.set(head, PREFIX_BYTES);
  out.set(body, PREFIX_BYTES + padded(head.length));
  return out;
}
