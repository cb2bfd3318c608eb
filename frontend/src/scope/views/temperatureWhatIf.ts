/** What sampling would do at any temperature: from logits of the candidates and the logged partition sums. */

/** Temperatures of the tensor `partition`. */
export const TEMPERATURES = [0.1, 0.25, 0.5, 0.7, 0.85, 1, 1.2, 1.5, 2] as const;

/** Probability of each candidate at `TEMPERATURES[index]`: exp(logit / t - log sum exp(logit / t)). */
export function whatIf(logits: Float32Array, partition: Float32Array, index: number): Float64Array {
  const temperature = TEMPERATURES[index] ?? 1;
  const sum = partition[index] ?? Number.NaN;
  return Float64Array.from(logits, (logit) => Math.min(1, Math.exp(logit / temperature - sum)));
}

/** What is known of one place: candidates by falling logit, and the sums over the whole vocabulary. */
export interface Reading {
  readonly logits: Float32Array;
  readonly partition: Float32Array;
  readonly vocabulary: number;
}

export interface Rules {
  readonly temperature: number;
  /** 0: no limit. */
  readonly topK: number;
  /** 1: no limit. */
  readonly topP: number;
}

/** Of the candidates the first `sure` may be drawn, those from `possible` on may not; between them it is unknown. */
export interface Allowed {
  readonly sure: number;
  readonly possible: number;
}

/** Sampling takes no temperature below. */
const COLDEST = 1e-3;
/** Share of all that 32-bit floats leave in doubt. */
const DOUBT = 2e-5;

/** Log of the weight of all tokens that are not candidates, at 1/t = `beta`: between `low` and `high`. */
interface Rest {
  readonly beta: number;
  readonly low: number;
  readonly high: number;
}

const sum = (values: readonly number[]): number => values.reduce((total, value) => total + value, 0);

/** At the temperatures of the partition sums, and at an endless one, where every token weighs 1; by rising beta. */
function knots({ logits, partition, vocabulary }: Reading): Rest[] {
  const others = Math.log(Math.max(0, vocabulary - logits.length));
  const measured = TEMPERATURES.map((temperature, index) => {
    const total = partition[index] ?? Number.NaN;
    const share = 1 - sum([...logits].map((logit) => Math.exp(logit / temperature - total)));
    const at = (mass: number): number => total + Math.log(Math.max(0, mass));
    return { beta: 1 / temperature, low: at(share - DOUBT), high: at(Math.max(0, share) + DOUBT) };
  });
  return [{ beta: 0, low: others, high: others }, ...measured.toReversed()];
}

const line = (a: readonly [number, number], b: readonly [number, number], at: number): number =>
  a[1] + ((b[1] - a[1]) / (b[0] - a[0])) * (at - a[0]);

/**
 * Between knots. The log of a sum of exponentials is convex in beta: it lies below the chord of its neighbours, and
 * above the neighbouring chords where they are extended. Beyond the last knot no other token falls slower than the last
 * candidate.
 */
function restAt(reading: Reading, beta: number): Rest {
  const all = knots(reading);
  const next = all.findIndex((knot) => knot.beta >= beta);
  const after = next < 0 ? all.length : next;
  const [a, b, before, behind] = [all[after - 1], all[after], all[after - 2], all[after + 1]];
  if (!a) return { ...(b as Rest), beta };
  const lows = [Number.NEGATIVE_INFINITY];
  if (before && before.high > Number.NEGATIVE_INFINITY)
    lows.push(line([before.beta, before.high], [a.beta, a.low], beta));
  if (b && behind) lows.push(line([b.beta, b.low], [behind.beta, behind.high], beta));
  const last = reading.logits.at(-1) ?? 0;
  const high = b ? line([a.beta, a.high], [b.beta, b.high], beta) : a.high + (beta - a.beta) * last;
  return { beta, low: Math.max(...lows.filter((value) => !Number.isNaN(value))), high };
}

/** How many of the candidates sampling may choose from: temperature first, then top-k, then top-p, as ranks do it. */
export function allowed(reading: Reading, { temperature, topK, topP }: Rules): Allowed {
  const { logits } = reading;
  const count = logits.length;
  if (temperature === 0) return { sure: Math.min(1, count), possible: Math.min(1, count) };
  const most = topK > 0 ? Math.min(topK, count) : count;
  if (topP >= 1) return { sure: most, possible: most };
  const beta = 1 / Math.max(temperature, COLDEST);
  const shift = (logits[0] ?? 0) * beta;
  const weights = [...logits.subarray(0, most)].map((logit) => Math.exp(logit * beta - shift));
  const rest = restAt(reading, beta);
  const known = sum(weights);
  // With a top-k beyond the candidates some of the others count, and it is unknown how many.
  const low = topK === 0 ? Math.exp(rest.low - shift) : 0;
  const high = topK === 0 || topK > count ? Math.exp(rest.high - shift) : 0;
  const reach = (total: number): number => {
    let before = 0;
    const end = weights.findIndex((weight) => {
      const out = before >= topP * total;
      before += weight;
      return out;
    });
    return Math.max(1, end < 0 ? most : end);
  };
  return { sure: reach(known + low), possible: reach(known + high) };
}

/** Index of the temperature that is nearest to that of a run, on a scale of ratios; that of the model for a greedy one. */
export function nearestTemperature(temperature: number): number {
  if (temperature <= 0) return TEMPERATURES.indexOf(1);
  const distance = (one: number): number => Math.abs(Math.log(one / temperature));
  const least = Math.min(...TEMPERATURES.map(distance));
  return TEMPERATURES.findIndex((one) => distance(one) === least);
}
