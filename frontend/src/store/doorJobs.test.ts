import { describe, expect, it } from "vitest";
import type { DoorJob } from "../api/types";
import { findingOf, iterationOf, ordered, placeOf } from "./doorJobs";

const plain: DoorJob = {
  namespace: "team",
  name: "demo",
  uid: "u",
  phase: "Running",
  iteration: 1200,
  totalIterations: 5000,
  restarts: 0,
  findings: [],
  hungRanks: [],
  createdAt: "2026-01-01T00:00:00Z",
};

describe("jobs in a list", () => {
  it("says how far they are", () => {
    expect(placeOf(plain)).toBe("team/demo");
    expect(iterationOf(plain)).toBe("1,200 / 5,000");
    expect(iterationOf({ ...plain, totalIterations: null })).toBe("1,200");
    expect(iterationOf({ ...plain, iteration: null })).toBe("–");
  });

  it("says what is wrong, hangs first", () => {
    expect(findingOf(plain)).toBeNull();
    expect(findingOf({ ...plain, findings: ["Rank 1 is slow."] })).toBe("Rank 1 is slow.");
    expect(findingOf({ ...plain, findings: ["One.", "Two.", "Three."] })).toBe("One. (2 more)");
    expect(findingOf({ ...plain, findings: ["One."], hungRanks: [3, 4] })).toBe("Rank 3, 4 hangs.");
  });

  it("puts those with a finding first and leaves the rest as it was", () => {
    const named = (name: string, ...findings: string[]): DoorJob => ({ ...plain, name, findings });
    const list = [named("a"), named("b", "slow"), named("c"), named("d", "slow")];
    expect(ordered(list).map((job) => job.name)).toEqual(["b", "d", "a", "c"]);
  });
});
