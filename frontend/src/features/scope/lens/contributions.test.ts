import { describe, expect, it } from "vitest";
import type { Attribution } from "../../../scope/client";
import { reachOf, contributionFile, contributionsOf, signed } from "./contributions";

const found: Attribution = {
  ...{ sample: 0, position: 3, token: 7, against: null, tokens: [7], texts: ["x"] },
  ...{ logit: 0.5, embedding: 0.25, constant: 0 },
  heads: [
    [1, -2],
    [0.5, 0],
  ],
  attentionBias: [0, 0],
  mlp: [0.75, 0],
  mlpBias: [0, 0],
  neurons: [[], []],
};

describe("contributions of a logit", () => {
  it("are listed by magnitude, without those that are zero, and sum up to the logit", () => {
    const contributions = contributionsOf(found);
    expect(contributions.map(({ name }) => name)).toEqual([
      "layer 0, head 1",
      "layer 0, head 0",
      "MLP of layer 0",
      "layer 1, head 0",
      "embedding",
    ]);
    expect(contributions.reduce((sum, { value }) => sum + value, 0)).toBe(found.logit);
    expect(reachOf(found)).toBe(2);
    expect([signed(-0.5), signed(1), signed(null)]).toEqual(["−0.500", "+1.000", "–"]);
  });

  it("are saved with their sum", async () => {
    const lines = (await contributionFile(found, "csv").text()).trim().split(/\r?\n/);
    expect(lines[1]).toBe('"layer 0, head 1",0,1,-2');
    expect(lines.at(-1)).toBe("logit,,,0.5");
  });
});
