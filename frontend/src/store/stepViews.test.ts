import { describe, expect, it } from "vitest";
import { StepStore } from "./stepStore";
import { rankShare, valueDomain } from "./stepViews";
import { header } from "./testSteps";

describe("views of steps", () => {
  it("give the newest steps of a rank as shares", () => {
    const store = new StepStore();
    const metrics = ["compute", "wait", "step", "slowdown"];
    store.addFrame(
      header({ steps: [1, 2, 3], durationsNs: [1e9, 1e9, 1e9], ranks: [0], metrics }),
      new Float32Array([0.5, 0.6, 0.7, 0.1, 0.2, 0.3, 1, 1, 1, 2, 3, 4]),
    );
    const share = rankShare(store, 0, 3);
    expect(share.compute).toBeCloseTo(0.6);
    expect(share.wait).toBeCloseTo(0.2);
    expect(share.slowdown).toBe(3);
    expect(valueDomain(store, "compute", 1, 2).high).toBeCloseTo(0.6);
    expect(rankShare(store, 5, 3)).toEqual({ compute: 0, wait: 0, slowdown: undefined });
  });
});
