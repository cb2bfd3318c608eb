import { flushPromises, mount } from "@vue/test-utils";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { defineComponent, h } from "vue";
import { ApiClient } from "../../../api/client";
import { provideJob } from "../../../composables/useJob";
import type { Peers, Slowdowns } from "./megascanApi";
import SlowdownPanel from "./SlowdownPanel.vue";

class SilentSocket {
  close(): void {
    return undefined;
  }
}
beforeEach(() => vi.stubGlobal("WebSocket", SilentSocket));
afterEach(() => vi.unstubAllGlobals());

const VIEW: Slowdowns = {
  attempt: 0,
  peers: "work",
  steps: [30, 31],
  skippedSteps: 0,
  slowdown: 1.5,
  recordedSeconds: [1.5, 1.5],
  idealSeconds: [1, 1],
  slowestFraction: null,
  lastStageFraction: null,
  launchRatio: null,
  kinds: {},
  replicasPerCell: 1,
  cells: [{ stage: 0, replica: 0, ranks: [0], slowdown: 1.5, steps: [1.5, 1.5] }],
  links: [],
};

function panelOf(answer: (peers: string | null) => Response) {
  const client = new ApiClient((input) => {
    const address = new URL(String(input), "http://hub/");
    return address.pathname.endsWith("/slowdowns")
      ? Promise.resolve(answer(address.searchParams.get("peers")))
      : new Promise(() => undefined);
  });
  const panel = mount(
    defineComponent(() => {
      provideJob(client);
      return () => h(SlowdownPanel);
    }),
    { global: { stubs: { MatrixHeat: true, SuspectsTable: true, ColourBar: true, FactList: true } } },
  );
  const choose = async (peers: Peers): Promise<void> => {
    await panel.get(`input[value=${peers}]`).trigger("change");
    await flushPromises();
  };
  return { panel, choose };
}

it("earlier steps compared with some peers are not shown next to steps compared with others", async () => {
  const { panel, choose } = panelOf((peers) => Response.json({ ...VIEW, peers: peers ?? "work" }));
  await flushPromises();
  await panel.get("form.range").trigger("submit");
  await flushPromises();
  expect(panel.find("[data-testid=compared]").exists()).toBe(true);
  await choose("pooled");
  expect(panel.find("form.range").exists()).toBe(true);
  expect(panel.find("[data-testid=compared]").exists()).toBe(false);
  panel.unmount();
});

it("other peers that the hub refuses are an error, and the ones before can be chosen again", async () => {
  const problem = { code: "busy", message: "too many requests", hint: "Wait a second." };
  const { panel, choose } = panelOf((peers) =>
    peers === "pooled" ? Response.json(problem, { status: 429 }) : Response.json(VIEW),
  );
  await flushPromises();
  await choose("pooled");
  expect(panel.get("[data-state=error]").text()).toContain("too many requests");
  await choose("work");
  expect(panel.find("[data-state=error]").exists()).toBe(false);
  expect(panel.find("form.range").exists()).toBe(true);
  panel.unmount();
});
