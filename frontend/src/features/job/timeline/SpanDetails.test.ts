import { flushPromises, mount, type VueWrapper } from "@vue/test-utils";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { defineComponent, h } from "vue";
import { ApiClient } from "../../../api/client";
import type { Timeline } from "../../../api/types";
import { provideJob } from "../../../composables/useJob";
import { Kind, PassFlag } from "../../../trace/kinds";
import { timelineOf, type Row } from "../../../trace/testTimeline";
import { buildTimeline } from "../../../trace/timeline";
import SpanDetails from "./SpanDetails.vue";

const ROWS: readonly Row[] = [
  [0, Kind.STEP, null, 0, 1000],
  [0, Kind.FORWARD, 1, 0, 200],
  [0, Kind.BACKWARD, 1, 300, 200],
  [0, Kind.WEIGHT, 1, 600, 100],
  [1, Kind.STEP, null, 0, 1000],
  [1, Kind.COPY, 1, 200, 50],
  [1, Kind.WEIGHT, 1, 700, 150],
];
const place = { worker: 0, node: "node-a", localRank: 0, tp: 0, cp: 0, ep: 0, pp: 0, device: "cpu" };
const JOB = {
  attempt: 0,
  faults: [],
  ranks: [
    { ...place, rank: 0, dp: 0, role: "backward" },
    { ...place, rank: 1, dp: 1, role: "backward" },
  ],
};

class SilentSocket {
  close(): void {
    return undefined;
  }
}
beforeEach(() => vi.stubGlobal("WebSocket", SilentSocket));
afterEach(() => vi.unstubAllGlobals());

async function detailsOf(
  span: number | null,
  more: Partial<Timeline> = {},
  ranks: readonly object[] = JOB.ranks,
): Promise<VueWrapper> {
  const source = { ...timelineOf(ROWS), flags: ROWS.map(() => 0), ...more };
  const client = new ApiClient((input) => {
    const answer = { "api/v1/job": { ...JOB, ranks }, "api/v1/verdicts": [] }[String(input)];
    return answer ? Promise.resolve(Response.json(answer)) : new Promise(() => undefined);
  });
  const page = mount(
    defineComponent(() => {
      provideJob(client);
      return () => h(SpanDetails, { model: buildTimeline(source), span });
    }),
  );
  await flushPromises();
  return page;
}

describe("details of a selected span", () => {
  it.each([
    [1, "Forward, microbatch 1"],
    [2, "Backward, microbatch 1"],
    [3, "Weight gradients, microbatch 1"],
  ])("names pass %i", async (span, title) => {
    const details = await detailsOf(span);
    expect(details.get("h3").text()).toBe(title);
    expect(details.text()).not.toContain("before its turn");
    expect(details.text()).toContain("node-a, cpu");
    details.unmount();
  });

  it("says why a pass ran before its turn", async () => {
    const details = await detailsOf(2, { flags: ROWS.map((_, index) => (index === 2 ? PassFlag.EARLY : 0)) });
    expect(details.text()).toContain("before its turn: the planned pass had no input yet");
    details.unmount();
  });

  it("compares weight gradients with those of the stage's other ranks", async () => {
    const details = await detailsOf(3);
    const peers = details.findAll(".peers button").map((button) => button.text());
    expect(peers).toHaveLength(2);
    expect(peers[1]).toContain("rank 1");
    await details.findAll(".peers button")[1]?.trigger("click");
    expect(details.findComponent(SpanDetails).emitted("go")).toEqual([[6]]);
    details.unmount();
  });

  it("lists the longest of many ranks, and the selected one", async () => {
    const many: Row[] = Array.from({ length: 100 }, (_, rank) => [rank, Kind.FORWARD, 1, 0, 100 + rank]);
    const ranks = many.map(([rank]) => ({ ...place, rank, dp: rank, role: "all" }));
    const details = await detailsOf(3, timelineOf(many), ranks);
    const peers = details
      .findAll(".peers button")
      .map((button) => Number(/\d+/.exec(button.get("span").text())?.[0]));
    expect(peers).toEqual([3, ...Array.from({ length: 23 }, (_, at) => 77 + at)]);
    expect(details.get(".peers h4").text()).toContain("the longest of 100");
    details.unmount();
  });

  it("gives size and peer of a copy", async () => {
    const sizes = ROWS.map((_, index) => (index === 5 ? 4096 : null));
    const details = await detailsOf(5, {
      bytes: sizes,
      peer: ROWS.map((_, index) => (index === 5 ? 0 : null)),
    });
    expect(details.get("h3").text()).toBe("Copy of a message, microbatch 1");
    expect(details.text()).toContain("4.00 KiB");
    expect(details.text()).toContain("rank 0");
    details.unmount();
  });

  it("names the role of a rank, and a wait for a shipment", async () => {
    const details = await detailsOf(5, {
      kind: ROWS.map(([, kind], index) => (index === 5 ? Kind.RECV_WAIT : kind)),
      peer: ROWS.map((_, index) => (index === 5 ? 0 : null)),
      roles: ["forward", "backward"],
    });
    expect(details.get("h3").text()).toBe("Wait for a shipment, microbatch 1");
    expect(details.get("[data-testid=span-rank]").text()).toBe("backward rank 1");
    details.unmount();
  });

  it("says how to select one", async () => {
    const details = await detailsOf(null);
    expect(details.text()).toContain("Select a span");
    details.unmount();
  });
});
