/** Tokens and predictions of a probe text in words. */
import type { ProbeResult, ProbeText } from "../../../api/types";
import { numberText } from "../layers/layersText";

/** A token with its blanks and line ends visible. */
export const tokenText = (token: string): string =>
  token.replaceAll(" ", "\u00b7").replaceAll("\n", "\u23ce");

/** The tokens of a row of an attention map. */
export function rowText({ tokens, block }: ProbeText, row: number): string {
  const own = tokens.slice(row * block, (row + 1) * block).map(tokenText);
  return `${row * block} ${own.length > 2 ? `${own[0] ?? ""}..${own.at(-1) ?? ""}` : own.join("")}`;
}

/** Cells of a token: itself, the log-probability of its follower, candidates with probabilities, its norm. */
export function tokenRow(text: ProbeText, result: ProbeResult, token: number): string[] {
  const candidates = (result.candidates[token] ?? []).map(
    (found) => `${tokenText(found.token)} ${Math.round(100 * Math.exp(found.logprob))} %`,
  );
  return [
    tokenText(text.tokens[token] ?? ""),
    numberText(result.logprobs[token]),
    candidates.join(", "),
    numberText(result.norms.at(-1)?.[token]),
  ];
}
