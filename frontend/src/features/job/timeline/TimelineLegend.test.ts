import { mount } from "@vue/test-utils";
import { describe, expect, it } from "vitest";
import { Kind, PassFlag } from "../../../trace/kinds";
import { timelineOf, type Row } from "../../../trace/testTimeline";
import { buildTimeline } from "../../../trace/timeline";
import TimelineLegend from "./TimelineLegend.vue";

const SPLIT: readonly Row[] = [
  [0, Kind.STEP, null, 0, 100],
  [0, Kind.FORWARD, 0, 0, 20],
  [0, Kind.BACKWARD, 0, 20, 20],
  [0, Kind.WEIGHT, 0, 40, 20],
];

function entriesOf(rows: readonly Row[], flags: readonly number[], queue: number | null = null): string[] {
  const source = { ...timelineOf(rows), flags: [...flags], runQueueNs: rows.map(() => queue) };
  const legend = mount(TimelineLegend, { props: { model: buildTimeline(source) } });
  return legend.findAll("li").map((entry) => entry.text());
}

describe("the legend of the timeline", () => {
  it("has forward, backward and weight passes apart, and only what occurs", () => {
    expect(entriesOf(SPLIT, [0, 0, 0, 0])).toEqual(["Forward", "Backward", "Weight gradients"]);
    expect(entriesOf(SPLIT.slice(0, 3), [0, 0, 0])).toEqual(["Forward", "Backward"]);
  });

  it("has shipments apart from other transfers", () => {
    const source = {
      ...timelineOf([
        [0, Kind.COPY, 0, 0, 2],
        [1, Kind.FORWARD, 0, 0, 2],
      ]),
      peer: [1, null],
    };
    const entries = (roles: ("forward" | "backward")[]): string[] => {
      const legend = mount(TimelineLegend, { props: { model: buildTimeline({ ...source, roles }) } });
      return legend.findAll("li").map((entry) => entry.text());
    };
    expect(entries(["backward", "forward"])).toContain("Shipment to a backward rank");
    expect(entries(["forward", "forward"])).not.toContain("Shipment to a backward rank");
  });

  it("explains the mark of passes before their turn where a pass has it", () => {
    const marked = "ran before its turn in the plan";
    expect(entriesOf(SPLIT, [0, 0, PassFlag.EARLY, 0])).toContain(marked);
    // The same bit of a step says that the optimizer skipped its update.
    expect(entriesOf(SPLIT, [PassFlag.EARLY, 0, 0, 0])).not.toContain(marked);
  });

  it("explains the share of waiting for a processor where one waited", () => {
    expect(entriesOf(SPLIT, [0, 0, 0, 0], 5)).toContain("share spent waiting for a processor");
    expect(entriesOf(SPLIT, [0, 0, 0, 0], 0)).not.toContain("share spent waiting for a processor");
  });
});
