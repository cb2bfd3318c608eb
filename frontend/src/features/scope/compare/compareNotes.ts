/** What of two runs is compared, in words. */
import type { Model } from "../../../scope/protocol";
import { commonCount, firstDifferent, type Samples } from "./differences";

/** Lengths and tokens that differ. */
export function textNotes(samples: Samples): string[] {
  const { a, b } = samples;
  const found: string[] = [];
  if (a.length !== b.length || a.promptLength !== b.promptLength)
    found.push(
      `A has ${a.promptLength} tokens of prompt and ${a.length} in all, B ${b.promptLength} and ${b.length}: positions 0 to ${commonCount(samples) - 1} are compared.`,
    );
  const first = firstDifferent(samples);
  if (first !== null)
    found.push(`Tokens differ from position ${first} on: from there on the inputs differ, too.`);
  return found;
}

/** Sizes that differ. */
export const modelNotes = (a: Model, b: Model): string[] =>
  a.layers === b.layers && a.heads === b.heads
    ? []
    : [
        `A has ${a.layers} layers of ${a.heads} heads, B ${b.layers} of ${b.heads}: the first that both have are compared.`,
      ];
