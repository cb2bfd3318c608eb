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

class SilentSocket {
  close(): void {
    return undefined;
  }
}

afterEach(() => vi.unstubAllGlobals());

describe("the page of a job that trains nothing", () => {
  it.each<[ScopeSource, string]>([
    ["live", "This job serves a model"],
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
    expect(page.text()).toContain("Open MegaScope");
    page.unmount();
  });
});
