/** The logit lens of a recorded session, in the form in which a hub answers it. */
import type { Frame } from "../../wire/frames";
import type { Lens } from "../client";
import { readTensors, type Raw } from "../tensors/tensors";

interface LensHeader {
  readonly kind: string;
  readonly sample: number;
  readonly rows: readonly [number, number];
  readonly layers: readonly number[];
  readonly token?: number | null;
  readonly tokens?: number[];
  readonly texts?: string[];
}

/** What a request for a lens names; positions are [first, end). */
export interface LensWish {
  readonly sample: number;
  readonly first: number;
  readonly end: number;
  readonly token: number | null;
}

const headerOf = (frame: Frame): LensHeader => frame.header as unknown as LensHeader;

/** Recorded lenses of a text, those of the most positions first. */
export const recordedLenses = (frames: readonly Frame[], sample: number): LensHeader[] =>
  frames
    .map(headerOf)
    .filter((header) => header.kind === "lens" && header.sample === sample)
    .toSorted((a, b) => b.rows[1] - b.rows[0] - (a.rows[1] - a.rows[0]));

const finite = (value: number): number | null => (Number.isFinite(value) ? +value.toPrecision(7) : null);
const rank = (value: number): number | null => (value < 0 ? null : value);

/** The lens of these positions, also of a recorded one that follows a token besides; null: it was not recorded. */
export function recordedLens(frames: readonly Frame[], wish: LensWish): Lens | null {
  const { token } = wish;
  const frame = frames.find((one) => {
    const { kind, sample, rows, token: named = null } = headerOf(one);
    const covers = rows?.[0] <= wish.first && rows?.[1] >= wish.end;
    return kind === "lens" && sample === wish.sample && covers && (token === null || named === token);
  });
  if (!frame) return null;
  const { sample, rows, layers, tokens = [], texts = [] } = headerOf(frame);
  const [tensors, count] = [readTensors(frame), rows[1] - rows[0]];
  const [from, to] = [wish.first - rows[0], wish.end - rows[0]];
  const table = <T>(name: string, value: (raw: Raw, at: number, each: number) => T): T[][] => {
    const tensor = tensors.get(`lens.${name}`);
    const each = tensor?.shape[2] ?? 1;
    return layers.map((_, layer) =>
      Array.from({ length: to - from }, (_, at) =>
        value(tensor?.data ?? new Float32Array(), (layer * count + from + at) * each, each),
      ),
    );
  };
  const number = (raw: Raw, at: number): number | null => finite(raw[at] ?? Number.NaN);
  const place = (raw: Raw, at: number): number | null => rank(raw[at] ?? -1);
  return {
    sample,
    layers: [...layers],
    positions: Array.from({ length: to - from }, (_, at) => wish.first + at),
    tokens,
    texts,
    ids: table("id", (raw, at, each) => [...raw.subarray(at, at + each)]),
    logprobs: table("logprob", (raw, at, each) => [...raw.subarray(at, at + each)].map(finite)),
    entropy: table("entropy", number),
    targetRank: table("target.rank", place),
    targetLogprob: table("target.logprob", number),
    token,
    tokenRank: token === null ? null : table("token.rank", place),
    tokenLogprob: token === null ? null : table("token.logprob", number),
  };
}
