/** A saved session, read in the page: frames back to back, as docs/scope-protocol.md, 9, has them. */
import { decodeFrame, FrameError, FrameType, PREFIX_BYTES, type Frame } from "../../wire/frames";
import { ScopeFrame, hasModel, type EarlyHello, type Hello } from "../protocol";
import { FrameStore, type RunStore } from "../store/frameStore";
import { decodeNumbers, type NumberCode } from "../tensors/codes";
import { readTensors } from "../tensors/tensors";

export interface RecordedSession {
  readonly hello: Hello;
  readonly store: FrameStore;
  readonly run: string;
  /** Frames SCOPE_ANALYSIS. */
  readonly analyses: readonly Frame[];
  /** Why the file was read in part only; null: it is whole. */
  readonly broken: string | null;
}

interface ValuesHeader {
  readonly run: string;
  readonly site: string;
  readonly sample: number;
  readonly layer: number;
  readonly head: number;
  readonly rows: readonly [number, number];
}

/** Frames up to the first that cannot be read, and why it cannot. */
function framesOf(data: Uint8Array): { readonly frames: Frame[]; readonly broken: string | null } {
  const frames: Frame[] = [];
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  for (let place = 0; place < data.length;) {
    try {
      if (data.length - place < PREFIX_BYTES) throw new FrameError("its end is missing");
      const length = view.getUint32(place, true);
      frames.push(decodeFrame(data.slice(place, place + length)));
      place += length;
    } catch (error) {
      return { frames, broken: `byte ${place} of ${data.length}: ${String((error as Error).message)}` };
    }
  }
  const last = frames.at(-1);
  const ended = last?.type === FrameType.ERROR ? String(last.header["message"]) : null;
  return { frames, broken: ended };
}

const code = (probability: number): number => Math.round(255 * Math.sqrt(probability));

/** Rows of attention that were requested or pinned. */
function addValues(run: RunStore, frame: Frame): void {
  const { site, sample, layer, head, rows } = frame.header as unknown as ValuesHeader;
  const tensor = readTensors(frame).get("attention");
  if (site !== "attention" || !tensor) return;
  const keys = tensor.shape[1] ?? 0;
  for (let row = 0; row < rows[1]; row += 1) {
    const [position, data] = [rows[0] + row, tensor.data.subarray(row * keys, (row + 1) * keys)];
    const codes =
      tensor.code === "u8s"
        ? new Uint8Array(data)
        : Uint8Array.from(decodeNumbers(tensor.code as NumberCode, data), code);
    run.sample(sample).setAttention(layer, head, position, codes.subarray(0, position + 1));
  }
}

/** Throws FrameError for what is no session of a model. */
export function readSession(data: Uint8Array): RecordedSession {
  const { frames, broken } = framesOf(data);
  const [first, ...others] = frames;
  const hello = first?.type === ScopeFrame.HELLO ? (first.header as unknown as EarlyHello) : null;
  if (!hello || !hasModel(hello))
    throw new FrameError("This is no session of MegaScope: choose a file that the button Session has saved.");
  const store = new FrameStore();
  const runs = others.filter((frame) => store.take(frame));
  const run = runs[0]?.header["run"];
  const held = typeof run === "string" ? store.runs.get(run) : undefined;
  if (!held) throw new FrameError(`The session holds no run. ${broken ?? ""}`.trim());
  for (const frame of others) if (frame.type === ScopeFrame.VALUES) addValues(held, frame);
  return {
    hello: { ...hello, source: "replay", role: "viewer" },
    store,
    run: held.header.run,
    analyses: others.filter(({ type }) => type === ScopeFrame.ANALYSIS),
    broken,
  };
}
