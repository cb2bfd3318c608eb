import { describe, expect, it } from "vitest";
import { periodBefore, planFacts, planRows, rankBubbles, transferRows, type TransferRow } from "./planText";
import type { PipelineView } from "../api/types";
import { periodOf, viewOf } from "./testPipeline";

const before = periodOf(
  { plan: "as measured" },
  { steps: 5, seconds: 0.3, bubble: 0.4, rankBubbles: [0.5, 0.3] },
);
const chosen = periodOf(
  {
    fromStep: 5,
    chosen: true,
    staticSeconds: 0.32,
    staticBubble: 0.42,
    simulatedSeconds: 0.25,
    simulatedBubble: 0.2,
  },
  { steps: 40, seconds: 0.26, bubble: 0.22, rankBubbles: [0.24, 0.2] },
);

const rowsOf = (view: PipelineView): TransferRow[] => transferRows(view.transfers, view.transferSteps);

describe("plans of MegaDPP in words", () => {
  it("says which numbers are simulated and which are measured, and in how many steps", () => {
    expect(planRows([before, chosen])).toEqual([
      { name: "Static order, simulated", length: "320 ms", bubble: "42 %" },
      { name: "Before the choice, measured in 5 steps", length: "300 ms", bubble: "40 %" },
      { name: "Plan in force, simulated", length: "250 ms", bubble: "20 %" },
      { name: "Plan in force, measured in 40 steps", length: "260 ms", bubble: "22 %" },
    ]);
    expect(planFacts(chosen)).toContainEqual(["Measured over simulated", "1.04×"]);
    expect(rankBubbles([before, chosen], 1)).toEqual(["rank 1", "30 %", "20 %"]);
  });

  it("has nothing to compare where the configuration fixes the order", () => {
    const fixed = periodOf(
      { schedule: "dfc", plan: "any ready pass", spareChunks: 0 },
      { steps: 1, seconds: 0.1 },
    );
    expect(planRows([fixed]).map(({ name }) => name)).toEqual(["Plan in force, measured in 1 step"]);
    expect(planFacts(fixed)).toContainEqual(["Chosen by", "the configuration"]);
    expect(planFacts(fixed)).toContainEqual(["Memory cap", "9 chunks of activations"]);
    expect(rankBubbles([fixed], 0)).toEqual(["rank 0", "–"]);
  });

  it("compares with steps of the same batch size only", () => {
    const small = periodOf({ microbatches: 4 }, { steps: 3 });
    expect(periodBefore([small, chosen])).toBeUndefined();
    expect(periodBefore([before, small, chosen])).toBe(before);
    expect(planRows([])).toEqual([]);
  });

  it("gives messages and bytes of a step, and the bandwidth of their copies", () => {
    const [row] = rowsOf(viewOf([chosen]));
    expect(row?.cells).toEqual(["0 → 1", "shared memory", "8", "16.0 KiB", "10.0 µs", "195 MiB/s"]);
    const silent = viewOf([chosen], { transferSteps: 0, transfers: [] });
    expect(rowsOf(silent)).toEqual([]);
  });
});
