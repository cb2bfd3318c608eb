import { flushPromises, mount, type VueWrapper } from "@vue/test-utils";
import { afterAll, afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { defineComponent, h } from "vue";
import { ApiClient } from "../../api/client";
import { provideJob } from "../../composables/useJob";
import type { ScopeSource } from "../../composables/useScopeLink";
import JobPage from "./JobPage.vue";
import ControlBar from "./training/ControlBar.vue";

const JOB = {
  name: "demo",
  phase: "Pending",
  attempt: 0,
  ranks: [],
  worldSize: 0,
  progress: null,
  layout: {},
  tracer: { state: "off" },
};
/** What of the job the page waits for; the history that comes behind it never does. */
const ANSWERS: Readonly<Record<string, object>> = { "api/v1/job": JOB, "api/v1/verdicts": [] };

const NONE = { count: 0, mean: null, median: null, p95: null };
const SERVED = {
  address: "http://127.0.0.2:8000/v1",
  waiting: 3,
  running: 2,
  refused: 1,
  ended: { stop: 5, error: 0 },
  latencies: { queue: NONE, firstToken: { count: 5, mean: 0.3, median: 0.25, p95: 0.9 }, outputToken: NONE },
};
const HELLO = {
  limits: { prompts: 4 },
  layout: { ranks: [{ rank: 0, stage: 0, tensor: 0, layers: [0, 4], heads: [0, 2] }] },
};

class SilentSocket {
  close(): void {
    return undefined;
  }
}

/** The page of a job whose hub gives these answers, and no other. */
function pageOf(
  answers: Readonly<Record<string, object>>,
  props: { scope: ScopeSource; serves: boolean },
  stubs: Readonly<Record<string, true>> = {},
  viewOnly?: string,
): VueWrapper {
  const client = new ApiClient((input) => {
    const answer = answers[String(input)];
    return answer ? Promise.resolve(Response.json(answer)) : new Promise(() => undefined);
  });
  return mount(
    defineComponent(() => {
      provideJob(client).viewOnly.value = viewOnly;
      return () => h(JobPage, props);
    }),
    { global: { stubs } },
  );
}

beforeEach(() => vi.stubGlobal("WebSocket", SilentSocket));
afterEach(() => vi.unstubAllGlobals());
/** Panels that load later may still be on their way. */
afterAll(() => vi.dynamicImportSettled());

describe("the page of a job whose ranks have roles", () => {
  const place = { worker: 0, node: "node-a", localRank: 0, tp: 0, cp: 0, ep: 0, dp: 0, device: "cpu" };
  const rank = (rank: number, pp: number, role: string): object => ({
    ...place,
    rank,
    pp,
    role,
    state: "training",
    step: null,
    openSpan: null,
  });

  it.each([
    [
      ["backward", "backward", "forward"],
      ["Stage 0, forward", "Stage 0, backward", "Stage 1, backward"],
      true,
    ],
    [["all", "all", "all"], ["Stage 0", "Stage 1"], false],
  ])("lists ranks by role and stage, and has a panel of the roles: %j", async (roles, stages, panel) => {
    const ranks = roles.map((role, at) => rank(at, at % 2, role));
    const page = pageOf(
      { ...ANSWERS, "api/v1/job": { ...JOB, ranks } },
      { scope: null, serves: false },
      { MegaFbdPanel: true, FaultsPanel: true, StepsPanel: true },
    );
    await flushPromises();
    expect(page.findAll(".stage .name").map((name) => name.text())).toEqual(stages);
    expect(page.find("mega-fbd-panel-stub").exists()).toBe(panel);
    page.unmount();
  });
});

it("tells the bar of a training why a viewer cannot control it", async () => {
  const page = pageOf(
    { ...ANSWERS, "api/v1/job": { ...JOB, training: { state: "running" } } },
    { scope: null, serves: false },
    { ControlBar: true, FaultsPanel: true, StepsPanel: true },
    "Needs the controller role",
  );
  await flushPromises();
  expect(page.getComponent(ControlBar).props("viewOnly")).toBe("Needs the controller role");
  page.unmount();
});

describe("the page of a job that trains nothing", () => {
  it.each<[ScopeSource, string]>([
    [null, "This job serves a model"],
    ["replay", "This is a recording of a model"],
  ])("says why: %s", async (scope, wanted) => {
    const page = pageOf(ANSWERS, { scope, serves: true });
    await flushPromises();
    expect(page.text()).toContain("Nothing trains here");
    expect(page.text()).toContain(wanted);
    expect(page.text().includes("Open MegaScope")).toBe(scope !== null);
    page.unmount();
  });

  it("shows the server: address, queue, slots, restarts, latency, ranks", async () => {
    const answers: Readonly<Record<string, object>> = {
      ...ANSWERS,
      "api/v1/job": { ...JOB, attempt: 2 },
      "api/v1/scope/served": SERVED,
      "api/v1/scope": HELLO,
    };
    const page = pageOf(answers, { scope: "live", serves: true });
    await vi.waitFor(() => page.get("[data-testid=latencies]"), 100_000);
    const fact = (name: string): string => page.get(`[data-fact="${name}"]`).text();
    expect(["Address", "In the queue", "Generating", "Ended", "Restarts"].map(fact)).toEqual([
      "http://127.0.0.2:8000/v1",
      "3, 1 refused",
      "2 of 4 slots",
      "5 stop",
      "2",
    ]);
    const [queue, first] = page.findAll("[data-testid=latencies] tbody tr").map((row) => row.text());
    expect(queue).toContain("–");
    expect(first).toContain("250 ms");
    expect(page.get("[data-testid=served-ranks]").text()).toContain("0 to 3");
    page.unmount();
  });
});
