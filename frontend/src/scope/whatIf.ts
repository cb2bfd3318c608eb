/** What the probabilities would have been at another temperature: from logits and the logged partition sums, exactly. */

/** Temperatures of the tensor `partition`. */
export const TEMPERATURES = [0.1, 0.25, 0.5, 0.7, 0.85, 1, 1.2, 1.5, 2] as const;

/** Probability of each candidate at `TEMPERATURES[index]`: exp(logit / t - log sum exp(logit / t)). */
export function whatIf(logits: Float32Array, partition: Float32Array, index: number): Float64Array {
  const temperature = TEMPERATURES[index] ?? 1;
  const sum = partition[index] ?? Number.NaN;
  return Float64Array.from(logits, (logit) => Math.min(1, Math.exp(logit / temperature - sum)));
}

/** How many of the candidates (falling probability) sampling may choose from: top-k first, then top-p. 0 is no limit. */
export function allowed(probabilities: Float64Array, topK: number, topP: number): number {
  const kept = topK > 0 ? Math.min(topK, probabilities.length) : probabilities.length;
  if (!(topP > 0 && topP < 1)) return kept;
  const whole = topK > 0 ? probabilities.subarray(0, kept).reduce((sum, part) => sum + part, 0) : 1;
  let sum = 0;
  for (let index = 0; index < kept; index += 1) {
    sum += (probabilities[index] ?? 0) / whole;
    if (sum >= topP) return index + 1;
  }
  return kept;
}
