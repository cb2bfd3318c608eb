import { flushPromises, mount } from "@vue/test-utils";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { defineComponent, h } from "vue";
import { ApiClient } from "../../../api/client";
import { provideJob, type JobApi } from "../../../composables/useJob";
import StepsPanel from "./StepsPanel.vue";

class SilentSocket {
  close(): void {
    return undefined;
  }
}
beforeEach(() => vi.stubGlobal("WebSocket", SilentSocket));
afterEach(() => vi.unstubAllGlobals());

/** Attempt 0 ended with step 150; attempt 1 resumed after step 100 and has done two steps. */
const DONE = [
  { attempt: 0, step: 149, durationNs: 1e9, loss: 4 },
  { attempt: 0, step: 150, durationNs: 1e9, loss: 3.5 },
  { attempt: 1, step: 101, durationNs: 2e9, loss: 5 },
  { attempt: 1, step: 102, durationNs: 3e9, loss: 4.5 },
];
const column = <K extends keyof (typeof DONE)[number]>(name: K) => DONE.map((step) => step[name]);

async function labelsOf(losses: readonly (number | null)[]) {
  const answers: Readonly<Record<string, unknown>> = {
    job: { name: "demo", ranks: [], attempt: 1, faults: [] },
    verdicts: [],
    steps: DONE.map(({ attempt, step, durationNs }) => ({
      attempt,
      step,
      durationNs,
      startNs: 0,
      complete: true,
    })),
    heatmap: { metric: "compute", attempts: [], steps: [], ranks: [], values: [] },
    "metrics/series": { name: "loss", attempts: column("attempt"), steps: column("step"), values: losses },
  };
  const client = new ApiClient((input) =>
    Promise.resolve(Response.json(answers[String(input).replace("api/v1/", "").split("?")[0] ?? ""])),
  );
  let job: JobApi | undefined;
  const page = mount(
    defineComponent(() => {
      job = provideJob(client);
      return () => h(StepsPanel);
    }),
    { global: { stubs: { LineChart: true, HeatTrack: true, ColourBar: true } } },
  );
  await flushPromises();
  const labels = page.findAll(".label").map((label) => label.text());
  page.unmount();
  return { labels, newest: job?.newestStep.value };
}

it("the newest step, and the numbers above the curves, are of the attempt that runs", async () => {
  const { labels, newest } = await labelsOf(column("loss"));
  expect(newest).toBe(102);
  expect(labels).toEqual(["Loss 4.5000", "Step time 3.00 s"]);
});

it("a newest loss that is no number is not replaced by the one before", async () => {
  const { labels } = await labelsOf([4, 3.5, 5, null]);
  expect(labels[0]).toBe("Loss –");
});
