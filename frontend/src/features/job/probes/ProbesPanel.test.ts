import { flushPromises, mount, type VueWrapper } from "@vue/test-utils";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { defineComponent, h } from "vue";
import { ApiClient } from "../../../api/client";
import type { Probes } from "../../../api/types";
import { provideJob } from "../../../composables/useJob";
import ProbesPanel from "./ProbesPanel.vue";
import { rowText } from "./probesText";

const TEXT = { text: "the whale", tokens: ["the", " whale"], block: 1 };
const PROBES: Probes = {
  texts: [TEXT],
  steps: [
    { step: 50, attempt: 0, meanLogprobs: [-4], perturbation: "00c0ffee0000" },
    { step: 100, attempt: 0, meanLogprobs: [-2], perturbation: null },
  ],
  layers: [0, 1],
  heads: 2,
};

class SilentSocket {
  close(): void {
    return undefined;
  }
}

function answerTo(address: string): unknown {
  if (address === "api/v1/training/probes") return PROBES;
  const step = Number(address.split("/")[4]);
  if (address.includes("attention"))
    return {
      step,
      text: 0,
      layer: 0,
      head: 0,
      block: 1,
      probabilities: [
        [1, 0],
        [0.25, 0.75],
      ],
    };
  const candidates = [[{ token: " whale", logprob: Math.log(0.5) }], []];
  return {
    step,
    text: 0,
    logprobs: [-step / 50, null],
    candidates,
    layers: [-1, 1],
    norms: [
      [1, 2],
      [3, 4],
    ],
  };
}

function panelOf(answer: (address: string) => unknown, asked: string[] = []): VueWrapper {
  const client = new ApiClient((input) => {
    const address = String(input);
    if (!address.includes("probes")) return new Promise(() => undefined);
    asked.push(address);
    const found = answer(address);
    return found === undefined ? new Promise(() => undefined) : Promise.resolve(Response.json(found));
  });
  return mount(
    defineComponent(() => {
      provideJob(client);
      return () => h(ProbesPanel);
    }),
    { global: { stubs: { PictureCanvas: true } } },
  );
}

beforeEach(() => vi.stubGlobal("WebSocket", SilentSocket));
afterEach(() => vi.unstubAllGlobals());

describe("the panel of probe texts", () => {
  it("says that the results of a step are being loaded", async () => {
    const panel = panelOf((address) => (address === "api/v1/training/probes" ? PROBES : undefined));
    await flushPromises();
    expect(panel.get("[data-state=loading]").text()).toContain("Loading the results of this step");
  });

  it("shows the newest step, and another one as the slider says", async () => {
    const asked: string[] = [];
    const panel = panelOf(answerTo, asked);
    expect(panel.get("[data-state]").attributes("data-state")).toBe("loading");
    await flushPromises();
    expect(panel.get("[data-testid=probe-mean]").text()).toContain("-2.00");
    const rows = (): string[] => panel.findAll("tbody tr").map((row) => row.text());
    expect(rows()).toEqual(["the-2.00·whale 50 %3.00", "·whale–4.00"]);
    await panel.get("input[type=range]").setValue("0");
    await flushPromises();
    expect(rows()[0]).toBe("the-1.00·whale 50 %3.00");
    await panel.get("button[aria-pressed]").trigger("click");
    expect(rows().slice(0, 2)).toEqual(["0 the1.000.00", "1 ·whale0.2500.750"]);
    await panel.findAll("select")[1]?.setValue("1");
    await flushPromises();
    expect(asked.at(-1)).toBe("api/v1/training/probes/50/0/attention?layer=1&head=0");
    panel.unmount();
  });

  it("says that no text was run", async () => {
    const panel = panelOf(() => ({ ...PROBES, steps: [] }));
    await flushPromises();
    expect(panel.get("[data-state]").attributes("data-state")).toBe("empty");
    expect(rowText({ text: "", tokens: ["a", "b", "c", "d"], block: 3 }, 0)).toBe("0 a..c");
    panel.unmount();
  });
});
