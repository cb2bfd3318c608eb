import { flushPromises, mount, type VueWrapper } from "@vue/test-utils";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { defineComponent, h } from "vue";
import { ApiClient } from "../../../api/client";
import type { CapturedStepDetails, Captures } from "../../../api/types";
import { provideJob } from "../../../composables/useJob";
import LayersPanel from "./LayersPanel.vue";
import { cellAt, logMap, mapOf } from "./layersPicture";
import { csvOf, filledBins } from "./layersText";

const CAPTURES: Captures = {
  every: 50,
  sites: ["residual", "gradient"],
  site: "residual",
  quantity: "rms",
  steps: [
    {
      step: 50,
      attempt: 0,
      missing: [],
      firstNotFinite: null,
      perturbation: "00c0ffee0000",
      repeated: false,
    },
    {
      step: 100,
      attempt: 0,
      missing: [3],
      firstNotFinite: { site: "mlp1", layer: 1 },
      perturbation: null,
      repeated: true,
    },
  ],
  layers: [0, 1],
  values: [
    [0.5, 0.25],
    [2, null],
  ],
  notFinite: [
    [0, 0],
    [0, 7],
  ],
};
const HISTOGRAM = Array.from({ length: 40 }, (_, bin) => (bin === 23 ? 4 : bin === 25 ? 1 : 0));
const DETAILS: CapturedStepDetails = {
  step: { step: 100, attempt: 0, missing: [], firstNotFinite: null, perturbation: null, repeated: false },
  firstExponent: -24,
  statistics: [
    {
      site: "residual",
      layer: 0,
      count: 6,
      nan: 0,
      inf: 0,
      zero: 1,
      mean: -0.125,
      rms: 0.25,
      largest: 3,
      histogram: HISTOGRAM,
    },
  ],
};

class SilentSocket {
  close(): void {
    return undefined;
  }
}

/** The panel of a job whose hub gives this answer about captures. */
function panelOf(answer: () => Response, asked: string[] = []): VueWrapper {
  const client = new ApiClient((input) => {
    const address = String(input);
    asked.push(address);
    if (address.startsWith("api/v1/training/captures?")) return Promise.resolve(answer());
    if (address === "api/v1/training/captures/100") return Promise.resolve(Response.json(DETAILS));
    return new Promise(() => undefined);
  });
  return mount(
    defineComponent(() => {
      provideJob(client);
      return () => h(LayersPanel);
    }),
    { global: { stubs: { PictureCanvas: true } } },
  );
}

beforeEach(() => vi.stubGlobal("WebSocket", SilentSocket));
afterEach(() => vi.unstubAllGlobals());

describe("the panel of layers over steps", () => {
  it("warns of NaN and missing ranks, and shows the numbers of a chosen cell", async () => {
    const asked: string[] = [];
    const panel = panelOf(() => Response.json(CAPTURES), asked);
    await flushPromises();
    const [broken, perturbed, partial] = panel
      .findAll("[data-testid=layers-warning]")
      .map((line) => line.text());
    expect(broken).toBe("NaN or Inf since step 100, first in MLP, first layer, layer 1.");
    expect(perturbed).toBe("1 of 2 steps were perturbed, the newest is step 50 (00c0ffee0000).");
    expect(partial).toContain("1 of 2 steps are incomplete; in step 100 ranks 3 are missing");

    const heat = panel.get("[data-testid=layers-heat]");
    await heat.trigger("keydown", { key: "ArrowDown" });
    expect(panel.text()).toContain("layer 1, step 100: –, 7 NaN or Inf");
    await heat.trigger("keydown", { key: "ArrowUp" });
    await flushPromises();
    const cell = panel.get("[data-testid=captured-cell]");
    expect(cell.text()).toContain("residual, layer 0, step 100");
    expect(cell.findAll("tbody th").map((bin) => bin.text())).toEqual(["2-1", "20", "21"]);

    await panel.get("button[aria-pressed]").trigger("click");
    const rows = panel.findAll("[data-testid=data-table] tbody tr").map((row) => row.text());
    expect(rows).toEqual(["1000.250– (7 NaN or Inf)", "50 (perturbed)0.5002.00"]);

    await panel.findAll("select")[0]?.setValue("gradient");
    await flushPromises();
    await vi.waitFor(() => expect(asked.at(-1)).toContain("site=gradient"), 100_000);
    panel.unmount();
  });

  it("says why another site is refused, and leaves the lists to go back", async () => {
    const problem = { code: "busy", message: "too many requests", hint: "Wait a second." };
    let refuses = false;
    const panel = panelOf(() =>
      refuses ? Response.json(problem, { status: 429 }) : Response.json(CAPTURES),
    );
    await flushPromises();
    refuses = true;
    await panel.findAll("select")[0]?.setValue("gradient");
    await flushPromises();
    expect(panel.get("[data-state=error]").text()).toContain("too many requests");
    expect(panel.find("[data-testid=layers-heat]").exists()).toBe(false);
    refuses = false;
    await panel.findAll("select")[0]?.setValue("residual");
    await flushPromises();
    expect(panel.find("[data-testid=layers-heat]").exists()).toBe(true);
    panel.unmount();
  });

  it("says that there is no captured step, and why there is no answer", async () => {
    const none = panelOf(() =>
      Response.json({ ...CAPTURES, steps: [], layers: [], values: [], notFinite: [] }),
    );
    expect(none.get("[data-state]").attributes("data-state")).toBe("loading");
    await flushPromises();
    expect(none.get("[data-state=empty]").text()).toContain("No captured step yet");
    none.unmount();
    const problem = { code: "busy", message: "too many requests", hint: "Wait a second." };
    const failed = panelOf(() => Response.json(problem, { status: 429 }));
    await flushPromises();
    expect(failed.get("[data-state=error]").text()).toContain("Wait a second.");
    failed.unmount();
  });
});

describe("colours, cells and files of captures", () => {
  it("maps magnitudes by their logarithm", () => {
    const map = logMap(0.01, 100);
    expect([0, 0.01, 1, 100, 1e9].map((value) => map.position(value))).toEqual([0, 0, 0.5, 1, 1]);
    expect(mapOf(CAPTURES, "dark").marks).toEqual([0.25, 2]);
    expect(mapOf({ ...CAPTURES, values: [[0], [null]] }, "dark").position(0)).toBe(0);
    expect(mapOf({ ...CAPTURES, quantity: "mean", values: [[-3], [1]] }, "dark").marks).toEqual([-3, 0, 3]);
  });

  it("finds the cell under a point, and none beside the picture", () => {
    expect(cellAt(CAPTURES, 478, 70, 2)).toEqual({ row: 0, column: 0 });
    expect(cellAt(CAPTURES, 478, 460, 30)).toEqual({ row: 1, column: 1 });
    expect(cellAt(CAPTURES, 478, 20, 2)).toBeNull();
    expect(cellAt(CAPTURES, 478, 70, 400)).toBeNull();
  });

  it("saves every cell, and shows no bins without values", async () => {
    expect(await csvOf(CAPTURES).text()).toBe(
      "site,layer,step,rms,NaN and Inf,perturbation\r\nresidual,0,50,0.5,0,00c0ffee0000\r\nresidual,0,100,0.25,0,\r\nresidual,1,50,2,0,00c0ffee0000\r\nresidual,1,100,,7,\r\n",
    );
    const [statistics] = DETAILS.statistics;
    expect(statistics && filledBins(statistics, -24)).toHaveLength(3);
    expect(statistics && filledBins({ ...statistics, histogram: [0, 0] }, -24)).toEqual([]);
  });
});
