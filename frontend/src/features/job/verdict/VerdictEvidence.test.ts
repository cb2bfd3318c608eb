import { flushPromises, mount } from "@vue/test-utils";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { defineComponent, h } from "vue";
import { ApiClient } from "../../../api/client";
import type { Verdict } from "../../../api/types";
import { provideJob } from "../../../composables/useJob";
import VerdictEvidence from "./VerdictEvidence.vue";
import VerdictHistory from "./VerdictHistory.vue";

class SilentSocket {
  close(): void {
    return undefined;
  }
}
beforeEach(() => vi.stubGlobal("WebSocket", SilentSocket));
afterEach(() => vi.unstubAllGlobals());

/** The rank was slow in steps 6 and 7 of attempt 0; attempt 1 has done step 7 again. */
const VERDICT: Verdict = {
  id: "a",
  subject: { type: "rank", ranks: [0], worker: 0, node: "node-a" },
  cause: "compute",
  state: "cleared",
  stale: false,
  effect: { secondsPerStep: 0.1, secondsLost: 0.7, slowdown: 3 },
  confidence: 0.97,
  evidence: { steps: [6, 7], text: [] },
  since: { attempt: 0, step: 7, time: 0 },
  until: { attempt: 0, step: 7, time: 1 },
  sentence: "",
};
const STEPS = [
  { attempt: 0, step: 6, startNs: 0, durationNs: 1e9, complete: true },
  { attempt: 1, step: 7, startNs: 0, durationNs: 2e9, complete: true },
];
const ANSWERS: Readonly<Record<string, unknown>> = {
  job: { name: "demo", ranks: [], attempt: 1 },
  verdicts: [],
  steps: STEPS,
  heatmap: { metric: "compute", attempts: [0, 1], steps: [6, 7], ranks: [0], values: [[0.5, 0.25]] },
  "metrics/series": { name: "loss", attempts: [], steps: [], values: [] },
};

it("evidence of an attempt is not shown by the steps of another", async () => {
  const went: unknown[] = [];
  const onGo = (change: unknown): unknown => went.push(change);
  const client = new ApiClient((input) =>
    Promise.resolve(Response.json(ANSWERS[String(input).replace("api/v1/", "").split("?")[0] ?? ""])),
  );
  const page = mount(
    defineComponent(() => {
      provideJob(client);
      return () => [
        h(VerdictEvidence, { verdict: VERDICT, onGo }),
        h(VerdictHistory, { verdicts: [VERDICT], open: true, onGo }),
      ];
    }),
  );
  await flushPromises();
  const chips = page.findAll(".chip");
  expect(chips.map((chip) => chip.text())).toEqual(["step 6", "step 7 of attempt 0"]);
  expect(chips[1]?.attributes("title")).toBe("The finding is of attempt 0; step 7 is shown of attempt 1");
  for (const chip of chips) await chip.trigger("click");
  expect(went).toEqual([{ step: 6, rank: 0, span: null }]);

  await page
    .findAll("button")
    .find((button) => button.text() === "Show as a table")
    ?.trigger("click");
  const rows = page.findAll("tbody tr").map((row) => row.findAll("td").map((cell) => cell.text()));
  expect(rows.map((row) => row.slice(0, 3))).toEqual([
    ["6", "1.00 s", "500 ms"],
    ["7 of attempt 0", "–", "–"],
  ]);
  const past = page.get("details button");
  expect(past.text()).toBe("steps 7–7 of attempt 0");
  for (const button of [past, ...page.findAll("tbody button")]) await button.trigger("click");
  expect(went).toHaveLength(2);
  page.unmount();
});
