import { flushPromises, mount } from "@vue/test-utils";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { defineComponent, h, nextTick } from "vue";
import { ApiClient } from "../../../api/client";
import type { Verdict } from "../../../api/types";
import { provideJob } from "../../../composables/useJob";
import { useSelection } from "../../../composables/useSelection";
import { rows, timelineOf } from "../../../trace/testTimeline";
import TimelineCanvas from "../timeline/TimelineCanvas.vue";
import BlamePanel from "./BlamePanel.vue";
import type { Blame } from "./megascanApi";
import SuspectsTable from "./SuspectsTable.vue";

class SilentSocket {
  close(): void {
    return undefined;
  }
}
const { selection, select } = useSelection();
beforeEach(() => vi.stubGlobal("WebSocket", SilentSocket));
afterEach(() => {
  select({ step: null, rank: null, span: null });
  vi.unstubAllGlobals();
});

/** Rank 1 was slow in steps 6 and 7 of attempt 0; attempt 1 has done step 7 again, and step 8. */
const VERDICT: Verdict = {
  id: "a",
  subject: { type: "rank", ranks: [1], worker: 0, node: "node-a" },
  cause: "compute",
  state: "confirmed",
  stale: false,
  effect: { secondsPerStep: 0.1, secondsLost: 0.7, slowdown: 3 },
  confidence: 0.97,
  evidence: { steps: [6, 7], text: [] },
  since: { attempt: 0, step: 6, time: 0 },
  until: null,
  sentence: "",
};
const BLAME: Blame = {
  attempt: 0,
  step: 7,
  peers: "work",
  recordedSeconds: 1,
  idealSeconds: 1,
  blamedSeconds: 0,
  blamed: [],
  victims: [],
  path: [],
  pathRanks: [0, 1],
  culpritSpans: [],
  victimSpans: [],
};
const stepOf = (attempt: number, step: number) => ({
  attempt,
  step,
  startNs: 0,
  durationNs: 1e9,
  complete: true,
});

async function opened(verdicts: readonly Verdict[]) {
  const asked: string[] = [];
  const client = new ApiClient((input) => {
    const { pathname, searchParams: query } = new URL(String(input), "http://hub/");
    const path = pathname.replace("/api/v1/", "");
    const [attempt, step] = [Number(query.get("attempt") ?? 1), Number(query.get("step") ?? 8)];
    if (path === "blame") asked.push(`step ${query.get("step")} of attempt ${query.get("attempt")}`);
    const answers: Readonly<Record<string, unknown>> = {
      job: { name: "demo", ranks: [], attempt: 1 },
      verdicts,
      steps: [stepOf(0, 6), stepOf(1, 7), stepOf(1, 8)],
      heatmap: { metric: "compute", attempts: [], steps: [], ranks: [], values: [] },
      "metrics/series": { name: "loss", attempts: [], steps: [], values: [] },
      blame: { ...BLAME, attempt, step },
      timeline: { ...timelineOf(rows), attempt, step },
    };
    return Promise.resolve(Response.json(answers[path]));
  });
  const page = mount(
    defineComponent(() => {
      provideJob(client);
      return () => [h(BlamePanel), h(SuspectsTable)];
    }),
    { global: { stubs: { TimelineCanvas: true } } },
  );
  await flushPromises();
  return { page, asked };
}

it("explains the evidence of a finding in its own attempt, and selects none of another", async () => {
  vi.useFakeTimers();
  const { page, asked } = await opened([VERDICT]);
  await vi.advanceTimersByTimeAsync(3000);
  vi.useRealTimers();
  expect(asked.at(-1)).toBe("step 7 of attempt 0");
  expect(page.get("h2").text()).toBe("Lost time of step 7 of attempt 0");
  page.getComponent(TimelineCanvas).vm.$emit("pick", 1, 0);
  expect(selection.value).toMatchObject({ step: null, span: null, rank: 0 });
  await page.get(".table-link").trigger("click");
  expect(selection.value).toMatchObject({ step: null, rank: 1 });
  page.unmount();
});

it("explains the selected step of the attempt that the page shows", async () => {
  const { page, asked } = await opened([VERDICT]);
  select({ step: 7 });
  await nextTick();
  await flushPromises();
  expect(asked.at(-1)).toBe("step 7 of attempt 1");
  expect(page.get("h2").text()).toBe("Lost time of step 7");
  page.getComponent(TimelineCanvas).vm.$emit("pick", 1, 0);
  expect(selection.value).toMatchObject({ step: 7, rank: 0 });
  expect(selection.value.span).not.toBeNull();
  page.unmount();
});

it("explains the newest step where nothing is named, and selects evidence that the page shows", async () => {
  const { page, asked } = await opened([
    { ...VERDICT, state: "cleared", evidence: { steps: [6], text: [] } },
  ]);
  expect(asked).toEqual(["step null of attempt null"]);
  expect(page.get("h2").text()).toBe("Lost time of step 8");
  await page.get(".table-link").trigger("click");
  expect(selection.value).toMatchObject({ step: 6, rank: 1 });
  page.unmount();
});
