import { flushPromises, mount, type VueWrapper } from "@vue/test-utils";
import { afterEach, describe, expect, it, vi } from "vitest";
import { defineComponent, h, nextTick } from "vue";
import { ApiClient } from "../api/client";
import type { JobView } from "../api/types";
import { createJobState } from "../composables/jobState";

const SERVES = { source: "live", model: { layers: 2 } };
const jobOf = (ranks: number, phase = "Pending"): JobView =>
  ({ phase, ranks: Array.from({ length: ranks }, () => ({})) }) as JobView;

let page: VueWrapper | undefined;
afterEach(() => {
  page?.unmount();
  vi.useRealTimers();
});

/** The page that an address of a job shows, in a fresh module world, with what its hub says of the model. */
async function landAt(url: string, said: () => object, ranks: number | null) {
  vi.resetModules();
  window.history.replaceState(null, "", url);
  const [{ useEntryRoute }, { useSelection }] = await Promise.all([
    import("./useEntryRoute"),
    import("../composables/useSelection"),
  ]);
  const asked = vi.fn(() => Promise.resolve(Response.json(said())));
  const state = createJobState();
  const { job, viewOnly } = state;
  job.value = ranks === null ? null : jobOf(ranks);
  const shown = defineComponent(() => {
    const { page: name } = useEntryRoute(new ApiClient(asked), state);
    return () => h("b", name.value);
  });
  page = mount(shown);
  await flushPromises();
  return { page, job, viewOnly, asked, ...useSelection() };
}

describe("a job's address", () => {
  it.each([
    ["that serves shows the model", "/", SERVES, 0, "scope"],
    ["that trains shows the training", "/", SERVES, 4, "job"],
    ["of which nothing is known yet shows the job", "/", SERVES, null, "job"],
    ["without a model shows the job", "/", { source: "live", model: null }, 0, "job"],
    ["that was recorded shows the recording", "/", { ...SERVES, source: "replay" }, null, "scope"],
    ["that names a run shows it at once", "/?run=0123456789ab", { model: null }, null, "scope"],
    ["that names the job's page shows it", "/?page=job", SERVES, 0, "job"],
    ["that names MegaScope shows it before there is a model", "/?page=scope", { model: null }, 4, "scope"],
  ])("%s", async (_, url, said, ranks, wanted) => {
    const landed = await landAt(url, () => said, ranks);
    expect(landed.page.text()).toBe(wanted);
  });

  it.each([
    [{ role: "viewer", model: null }, "Needs the controller role"],
    [{ role: "controller", model: null }, undefined],
    [{}, undefined],
  ])("opened by %j: changes are refused for %s", async (said, wanted) => {
    const { viewOnly } = await landAt("/", () => said, 4);
    expect(viewOnly.value).toBe(wanted);
  });

  it("stays as it is, so that Back leaves the job and leads from its page to the model", async () => {
    const { page: shown, select } = await landAt("/", () => SERVES, 0);
    const before = window.history.length;
    expect([shown.text(), window.location.search]).toEqual(["scope", ""]);
    select({ page: "job" });
    await nextTick();
    expect([shown.text(), window.location.search, window.history.length]).toEqual([
      "job",
      "?page=job",
      before + 1,
    ]);
    window.history.replaceState(null, "", "/");
    window.dispatchEvent(new PopStateEvent("popstate"));
    await nextTick();
    expect(shown.text()).toBe("scope");
  });

  it("shows a model that comes up later, and asks no more", async () => {
    vi.useFakeTimers();
    let said: object = { source: "live", model: null };
    const { page: shown, job, asked } = await landAt("/", () => said, 0);
    expect(shown.text()).toBe("job");
    await vi.advanceTimersByTimeAsync(60_000);
    job.value = jobOf(0, "Running");
    await vi.advanceTimersByTimeAsync(2000);
    said = SERVES;
    await vi.advanceTimersByTimeAsync(2000);
    expect(shown.text()).toBe("scope");
    await vi.advanceTimersByTimeAsync(60_000);
    expect(asked, "once at first, and twice of what runs").toHaveBeenCalledTimes(3);
  });

  it.each([
    ["that trains", 4, "Running"],
    ["of which nothing runs yet, or without tracing", 0, "Pending"],
    ["that has ended", 0, "Ended"],
  ])("%s is not asked for a model again and again", async (_, ranks, phase) => {
    vi.useFakeTimers();
    const { job, asked } = await landAt("/", () => ({ source: "live", model: null }), ranks);
    job.value = jobOf(ranks, phase);
    await vi.advanceTimersByTimeAsync(60_000);
    expect(asked).toHaveBeenCalledTimes(1);
  });
});
