/** What the matrix of the logit lens can show, and its colours. Rows are layers, columns positions. */
import { magnitudeMap, type ColourMap, type ThemeName } from "../../../render/colour";
import { probabilityMap } from "../../../render/maps";
import { Mask, type Cells } from "../../../render/cells";
import type { Lens } from "../../../scope/client";
import { ABSENT } from "../../../store/format";

export const LENS_VIEWS = [
  { value: "top", label: "Top token", note: "probability of the likeliest token after each layer" },
  { value: "entropy", label: "Entropy", note: "entropy of what each layer predicts, in nats" },
  { value: "rank", label: "Next token", note: "rank of the token that follows in the text, from 0" },
  { value: "watched", label: "Followed", note: "rank of the token that you follow, from 0" },
] as const;
export type LensView = (typeof LENS_VIEWS)[number]["value"];

/** Ranks on a logarithmic scale: the likeliest token is bright. */
export const rankMap = (vocabulary: number): ColourMap => ({
  position: (rank) =>
    1 - Math.min(1, Math.log1p(Math.max(0, rank)) / Math.log1p(Math.max(1, vocabulary - 1))),
  table: magnitudeMap(0, 1).table,
  marks: [vocabulary - 1, 0],
});

export function lensMap(view: LensView, theme: ThemeName, vocabulary: number): ColourMap {
  if (view === "top") return probabilityMap(theme);
  return view === "entropy" ? magnitudeMap(0, Math.log(vocabulary)) : rankMap(vocabulary);
}

type Table = Lens["entropy"] | null | undefined;

/** Value of a cell; null: there is none. */
export function lensValue(lens: Lens, view: LensView, layer: number, column: number): number | null {
  if (view === "top") return probabilityOf(lens.logprobs[layer]?.[column]?.[0]);
  const tables: Readonly<Record<Exclude<LensView, "top">, Table>> = {
    entropy: lens.entropy,
    rank: lens.targetRank,
    watched: lens.tokenRank,
  };
  return tables[view]?.[layer]?.[column] ?? null;
}

const probabilityOf = (logprob: number | null | undefined): number | null =>
  logprob === undefined || logprob === null ? null : Math.exp(logprob);

export const percent = (value: number): string =>
  value >= 0.0995 ? `${(value * 100).toFixed(1)} %` : `${(value * 100).toPrecision(2)} %`;

export function lensText(view: LensView, value: number | null): string {
  if (value === null) return ABSENT;
  if (view === "top") return percent(value);
  return view === "entropy" ? `${value.toFixed(2)} nats` : `rank ${value}`;
}

export function fillLens(cells: Cells, lens: Lens, view: LensView, map: ColourMap): void {
  cells.resize(lens.positions.length, lens.layers.length);
  for (let row = 0; row < lens.layers.length; row += 1) {
    for (let column = 0; column < lens.positions.length; column += 1) {
      const value = lensValue(lens, view, row, column);
      if (value !== null) cells.set(column, row, Math.round(255 * map.position(value)), Mask.VALUE);
    }
  }
}

/** Most numbers of a request: the hub refuses larger ones. */
const MOST = { cells: 1 << 14, tokens: 1 << 17, positions: 256 };

/** Positions [first, end) that are read together with `position`, of `count` in all. */
export function windowOf(
  position: number,
  count: number,
  layers: number,
  top: number,
): { readonly first: number; readonly end: number } {
  const fits = Math.floor(Math.min(MOST.cells, MOST.tokens / top) / Math.max(1, layers));
  const size = Math.max(1, Math.min(MOST.positions, fits));
  const first = Math.floor(Math.max(0, Math.min(position, count - 1)) / size) * size;
  return { first, end: Math.min(count, first + size) };
}

/** Texts of the tokens that a lens names. */
export const lensTexts = (lens: Lens): ReadonlyMap<number, string> =>
  new Map(lens.tokens.map((token, at) => [token, lens.texts[at] ?? ""]));
