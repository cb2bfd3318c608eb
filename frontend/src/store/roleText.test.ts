import { describe, expect, it } from "vitest";
import { modeRows, rankCells, roleRows, shipFacts } from "./roleText";
import { PUBLISHED, rolesOf } from "./testRoles";

describe("MegaFBD in words", () => {
  it("says what is shipped, by whose choice, and how many replicas a forward rank serves", () => {
    expect(shipFacts(PUBLISHED)).toContainEqual(["Chosen by", "measured times of the modes"]);
    expect(shipFacts(PUBLISHED)).toContainEqual(["A forward rank serves", "2 replicas"]);
    expect(shipFacts(PUBLISHED)).toContainEqual(["Shipped for a microbatch", "3.00 MiB"]);
    expect(shipFacts(PUBLISHED)).toContainEqual(["Advised backward per forward", "3"]);
    const merged = shipFacts({ ...PUBLISHED, merged: true, chosen: false, advisedBackwardPerForward: null });
    expect(merged).toContainEqual(["A forward rank serves", "a tensor group"]);
    expect(merged.map(([name]) => name)).not.toContain("Advised backward per forward");
  });

  it("has the cost of each mode, without a time where none was measured", () => {
    expect(modeRows(PUBLISHED)).toEqual([
      { name: "saved", size: "5.00 MiB", step: "300 ms", inForce: false },
      { name: "selective", size: "3.00 MiB", step: "250 ms", inForce: true },
      { name: "full", size: "1.00 MiB", step: "–", inForce: false },
    ]);
  });

  it("compares the roles, and lists their ranks, forward ranks first", () => {
    const { roles } = rolesOf();
    expect(roleRows(roles).map((row) => [row.ranks, row.busy, row.passes, row.wait])).toEqual([
      ["1 forward rank", "50 %", "F 10.0 ms", "4.00 ms for credits"],
      ["2 backward ranks", "80 %", "B + W 20.0 ms", "2.00 ms for shipments"],
    ]);
    expect(rankCells(roles, 0)).toEqual(["rank 2", "forward", "50 %", "10.0 ms", "4.00 ms"]);
    expect(rankCells(roles, 2)).toEqual(["rank 1", "backward", "85 %", "20.0 ms", "3.00 ms"]);
    expect(rankCells(roles.toReversed(), 2)).toEqual(rankCells(roles, 0));
    expect(rankCells(roles, 3)).toEqual([]);
  });
});
