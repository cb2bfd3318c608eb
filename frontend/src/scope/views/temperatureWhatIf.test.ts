import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { allowed, TEMPERATURES, whatIf, nearestTemperature } from "./temperatureWhatIf";

const logits = fc.array(fc.float({ min: -30, max: 30, noNaN: true }), { minLength: 2, maxLength: 40 });

/** As the model's rank works it out. */
function partitionOf(all: readonly number[]): Float32Array {
  return Float32Array.from(TEMPERATURES, (temperature) => {
    const highest = Math.max(...all) / temperature;
    return highest + Math.log(all.reduce((sum, logit) => sum + Math.exp(logit / temperature - highest), 0));
  });
}

describe("whatIf", () => {
  it("sums to one over the vocabulary at every temperature", () => {
    fc.assert(
      fc.property(logits, (all) => {
        TEMPERATURES.forEach((_, index) => {
          const sum = whatIf(Float32Array.from(all), partitionOf(all), index).reduce((a, b) => a + b, 0);
          expect(sum).toBeCloseTo(1, 3);
        });
      }),
    );
  });

  it("equals a softmax worked out by hand", () => {
    const [one, half] = [TEMPERATURES.indexOf(1), TEMPERATURES.indexOf(0.5)];
    const all = Float32Array.of(Math.log(3), 0);
    expect([...whatIf(all, partitionOf([...all]), one)].map((p) => +p.toFixed(6))).toEqual([0.75, 0.25]);
    expect([...whatIf(all, partitionOf([...all]), half)].map((p) => +p.toFixed(6))).toEqual([0.9, 0.1]);
  });

  it("never lets a colder choice be more even", () => {
    fc.assert(
      fc.property(logits, (all) => {
        const sorted = Float32Array.from(all.toSorted((a, b) => b - a));
        const first = TEMPERATURES.map((_, index) => whatIf(sorted, partitionOf(all), index)[0] ?? 0);
        first
          .slice(1)
          .forEach((value, index) => expect(value).toBeLessThanOrEqual((first[index] ?? 0) + 1e-4));
      }),
    );
  });

  const reading = fc.array(fc.float({ min: -8, max: 8, noNaN: true }), { minLength: 12, maxLength: 40 });
  const temperature = fc.oneof(
    fc.double({ min: 0.05, max: 4, noNaN: true }),
    fc.constantFrom(0, ...TEMPERATURES),
  );
  /** As ranks choose: temperature, then top-k, then top-p; the first always stays. */
  function kept(all: readonly number[], t: number, topK: number, topP: number): number {
    if (t === 0) return 1;
    const most = topK > 0 ? Math.min(topK, all.length) : all.length;
    const weights = all.slice(0, most).map((logit) => Math.exp((logit - (all[0] ?? 0)) / t));
    const total = weights.reduce((a, b) => a + b, 0);
    let before = 0;
    for (let index = 0; index < most; index += 1) {
      if (index > 0 && topP < 1 && before / total >= topP) return index;
      before += weights[index] ?? 0;
    }
    return most;
  }
  const place = (all: readonly number[], candidates: number) => ({
    logits: Float32Array.from(all.slice(0, candidates)),
    partition: partitionOf(all),
    vocabulary: all.length,
  });

  it("cuts as sampling does at any temperature, or says that it cannot tell", () => {
    const rules = fc.tuple(
      temperature,
      fc.integer({ min: 0, max: 15 }),
      fc.double({ min: 0.05, max: 1, noNaN: true }),
    );
    fc.assert(
      fc.property(reading, rules, (some, [t, topK, topP]) => {
        const all = [...Float32Array.from(some).toSorted((a, b) => b - a)];
        const { sure, possible } = allowed(place(all, 10), { temperature: t, topK, topP });
        // Where the share before a token is top-p itself, floats decide.
        const least = Math.min(10, kept(all, t, topK, Math.max(0, topP - 1e-4)));
        const most = Math.min(10, kept(all, t, topK, Math.min(1, topP + 1e-4)));
        expect(sure).toBeLessThanOrEqual(most);
        expect(possible).toBeGreaterThanOrEqual(least);
      }),
      { numRuns: 300 },
    );
  });

  it("takes the temperature first, then top-p: at 0.5 less is left than at 1", () => {
    const all = [2, 1.5, 1, 0.5, 0, -0.5, -1, -1.5, -2, -2.5, -3, -3.5];
    const at = (t: number) => allowed(place(all, 10), { temperature: t, topK: 0, topP: 0.9 });
    expect(at(1)).toEqual({ sure: 5, possible: 5 });
    expect(at(0.5)).toEqual({ sure: 3, possible: 3 });
    expect(at(0.8)).toEqual({ sure: 4, possible: 4 });
    expect(allowed(place(all, 10), { temperature: 0, topK: 0, topP: 1 })).toEqual({ sure: 1, possible: 1 });
    expect(allowed(place(all, 10), { temperature: 1, topK: 3, topP: 1 })).toEqual({ sure: 3, possible: 3 });
  });
});

describe("the temperature that is shown at first", () => {
  it("is that of the run, or the nearest one; of a greedy run that of the model", () => {
    const shown = (temperature: number) => TEMPERATURES[nearestTemperature(temperature)];
    expect([0.7, 0.8, 1, 3, 0.01, 0].map(shown)).toEqual([0.7, 0.85, 1, 2, 0.1, 1]);
  });
});
