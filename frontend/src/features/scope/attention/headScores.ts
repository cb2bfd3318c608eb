/** Scores of heads over a text, and the texts that they can be computed over. */
import type { Cells } from "../../../render/cells";
import type { ColourMap } from "../../../render/colour";
import type { HeadScores } from "../../../scope/client";

export const SCORES = [
  {
    value: "induction",
    label: "Induction",
    note: "attention to the token after an earlier copy of this one",
  },
  { value: "previous", label: "Previous", note: "attention to the token before" },
  { value: "duplicate", label: "Duplicate", note: "attention to earlier copies of the same token" },
  { value: "first", label: "First", note: "attention to the first token" },
] as const;
export type ScoreName = (typeof SCORES)[number]["value"];

export const TEXTS = [
  { value: "text", label: "This text", query: {} },
  { value: "random", label: "Random, twice", query: { random: 64, seed: 0 } },
] as const;
export type TextName = (typeof TEXTS)[number]["value"];

/** NaN where the text has no token for which the score is defined. */
export const scoreOf = (found: HeadScores, name: string, layer: number, head: number): number =>
  found.values[found.scores.indexOf(name)]?.[layer]?.[head] ?? Number.NaN;

export interface RankedHead {
  readonly layer: number;
  readonly head: number;
  readonly value: number;
}

/** Heads with a score, the highest first. */
export const rankedHeads = (found: HeadScores, name: string): RankedHead[] =>
  (found.values[found.scores.indexOf(name)] ?? [])
    .flatMap((row, layer) => row.map((value, head) => ({ layer, head, value: value ?? Number.NaN })))
    .filter(({ value }) => !Number.isNaN(value))
    .toSorted((a, b) => b.value - a.value);

export function fillScores(
  cells: Cells,
  found: HeadScores | null,
  name: string,
  map: ColourMap,
  model: { readonly layers: number; readonly heads: number },
): void {
  cells.resize(model.heads, model.layers);
  for (const { layer, head, value } of found ? rankedHeads(found, name) : [])
    cells.set(head, layer, Math.round(255 * map.position(value)));
}
