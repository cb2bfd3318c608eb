import { flushPromises, mount } from "@vue/test-utils";
import { afterEach, describe, expect, it, vi } from "vitest";
import { defineComponent, h } from "vue";
import { ApiClient } from "../../api/client";
import { provideJob } from "../../composables/useJob";
import type { ScopeSource } from "../../composables/useScopeLink";
import JobPage from "./JobPage.vue";

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

afterEach(() => vi.unstubAllGlobals());

describe("the page of a job that trains nothing", () => {
  it.each<[ScopeSource, string]>([
    [null, "This job serves a model"],
    ["replay", "This is a recording of a model"],
  ])("says why: %s", async (scope, wanted) => {
    vi.stubGlobal("WebSocket", SilentSocket);
    const client = new ApiClient((input) => {
      const said = ANSWERS[String(input)];
      return said ? Promise.resolve(Response.json(said)) : new Promise(() => undefined);
    });
    const page = mount(
      defineComponent(() => {
        provideJob(client);
        return () => h(JobPage, { scope, serves: true });
      }),
    );
    await flushPromises();
    expect(page.text()).toContain("Nothing trains here");
    expect(page.text()).toContain(wanted);
    expect(page.text().includes("Open MegaScope")).toBe(scope !== null);
    page.unmount();
  });

  it("shows the server: address, queue, slots, restarts, latency, ranks", async () => {
    vi.stubGlobal("WebSocket", SilentSocket);
    const answers: Readonly<Record<string, object>> = {
      ...ANSWERS,
      "api/v1/job": { ...JOB, attempt: 2 },
      "api/v1/scope/served": SERVED,
      "api/v1/scope": HELLO,
    };
    const client = new ApiClient((input) => {
      const said = answers[String(input)];
      return said ? Promise.resolve(Response.json(said)) : new Promise(() => undefined);
    });
    const page = mount(
      defineComponent(() => {
        provideJob(client);
        return () => h(JobPage, { scope: "live", serves: true });
      }),
    );
    await vi.waitFor(() => expect(page.find("[data-testid=latencies]").exists()).toBe(true));
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
