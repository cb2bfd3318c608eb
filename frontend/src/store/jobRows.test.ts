import { describe, expect, it } from "vitest";
import type { GatewayJob, JobEntry } from "../api/types";
import { ordered, rowOfGateway, rowOfHub } from "./jobRows";
import { formatSelection, NOTHING } from "./selection";

const plain: GatewayJob = {
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

const beside: JobEntry = {
  uid: "v",
  namespace: "default",
  name: "older",
  phase: "Succeeded",
  here: false,
  iteration: 7,
  totalIterations: 9,
  restarts: 2,
  findings: ["Rank 3 is slow."],
};

describe("jobs in a list", () => {
  it("says how far they are, and what opens them", () => {
    expect(formatSelection({ ...NOTHING, ...rowOfGateway(plain).opens })).toBe("?job=team%2Fdemo");
    expect(rowOfGateway(plain)).toMatchObject({ iteration: "1,200 / 5,000", restarts: 0 });
    expect(rowOfGateway({ ...plain, totalIterations: null }).iteration).toBe("1,200");
    expect(rowOfGateway({ ...plain, iteration: null }).iteration).toBe("–");
  });

  it("says what is wrong, hangs first", () => {
    const findingOf = (more: Partial<GatewayJob>): string | null =>
      rowOfGateway({ ...plain, ...more }).finding;
    expect(findingOf({})).toBeNull();
    expect(findingOf({ findings: ["Rank 1 is slow."] })).toBe("Rank 1 is slow.");
    expect(findingOf({ findings: ["One.", "Two.", "Three."] })).toBe("One. (2 more)");
    expect(findingOf({ findings: ["One."], hungRanks: [3, 4] })).toBe("Rank 3, 4 hangs.");
  });

  it("puts those with a finding first and leaves the rest as it was", () => {
    const named = (name: string, ...findings: string[]) => rowOfGateway({ ...plain, name, findings });
    const list = [named("a"), named("b", "slow"), named("c"), named("d", "slow")];
    expect(ordered(list).map((row) => row.name)).toEqual(["b", "d", "a", "c"]);
  });

  it("shows a hub's job the same way, as far as the hub knows it", () => {
    const entry = { ...beside, name: "demo", here: true };
    const row = rowOfHub(entry, null, ["Rank 1 is slow.", "Rank 2 is slow."]);
    expect(row).toMatchObject({ iteration: "–", restarts: null, finding: "Rank 1 is slow. (1 more)" });
    expect(row.opens).toEqual({ page: null });
  });

  it("shows other jobs of the same user with the command that opens them", () => {
    const row = rowOfHub(beside, null, ["Rank 1 of the other job is slow."]);
    expect(row).toMatchObject({ iteration: "7 / 9", restarts: 2, finding: "Rank 3 is slow.", opens: null });
    expect(row.command).toBe("megatronapp ui older");
  });
});
