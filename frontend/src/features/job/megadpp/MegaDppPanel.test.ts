import { flushPromises, mount, type VueWrapper } from "@vue/test-utils";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { defineComponent, h } from "vue";
import { ApiClient } from "../../../api/client";
import { provideJob } from "../../../composables/useJob";
import { periodOf, viewOf } from "../../../store/testPipeline";
import MegaDppPanel from "./MegaDppPanel.vue";

class SilentSocket {
  close(): void {
    return undefined;
  }
}

/** The panel of a job whose hub gives these answers about the pipeline, one after another. */
function panelOf(...answers: (() => Response)[]): VueWrapper {
  const client = new ApiClient((input) => {
    if (String(input) !== "api/v1/pipeline") return new Promise(() => undefined);
    const [answer] = answers.length > 1 ? answers.splice(0, 1) : answers;
    return Promise.resolve((answer ?? (() => new Response(null, { status: 500 })))());
  });
  return mount(
    defineComponent(() => {
      provideJob(client);
      return () => h(MegaDppPanel);
    }),
    { global: { stubs: { LineChart: true } } },
  );
}

beforeEach(() => vi.stubGlobal("WebSocket", SilentSocket));
afterEach(() => vi.unstubAllGlobals());

const before = periodOf({}, { steps: 5, seconds: 0.3, bubble: 0.4, rankBubbles: [0.5, 0.3] });
const chosen = periodOf(
  { fromStep: 5, chosen: true, simulatedSeconds: 0.25, simulatedBubble: 0.2, staticSeconds: 0.32 },
  { steps: 1, seconds: 0.26, bubble: 0.22, rankBubbles: [0.24, 0.2] },
);

describe("the panel of MegaDPP", () => {
  it("shows the plan, what it was chosen from, its curves, bubbles of ranks, and transfers", async () => {
    const panel = panelOf(() => Response.json(viewOf([before, chosen])));
    await flushPromises();
    expect(panel.text()).toContain("auto: order of megatron-core");
    expect(panel.get("[data-testid=plan-facts]").text()).toContain("since step 5");
    const rows = panel.findAll("[data-testid=plan-rows] tbody tr").map((row) => row.text());
    expect(rows).toHaveLength(4);
    expect(rows[0]).toContain("Static order, simulated");
    expect(panel.text()).toContain("Passes before their turn 3 of 32");
    const [early, bubble] = panel.findAll("line-chart-stub");
    expect(early?.attributes("label")).toContain("newest 3 of 32");
    expect(bubble?.attributes("label")).toContain("newest 22 %");
    expect(panel.get("[data-testid=data-table]").text()).toContain("rank 1");
    expect(panel.get("[data-testid=transfers] tbody").text()).toContain("shared memory");
    panel.unmount();
  });

  it("says that no plan is there before the first step", async () => {
    const panel = panelOf(() => Response.json(viewOf([], { steps: [], transfers: [] })));
    await flushPromises();
    expect(panel.text()).toContain("No plan yet");
    panel.unmount();
  });

  it("shows an error with what to do, and tries again", async () => {
    const problem = { code: "x", message: "the hub is full", hint: "Empty it." };
    const panel = panelOf(
      () => Response.json(problem, { status: 500 }),
      () => Response.json(viewOf([chosen])),
    );
    await flushPromises();
    expect(panel.get("[role=alert]").text()).toContain("Empty it.");
    await panel.get("[role=alert] button").trigger("click");
    await flushPromises();
    expect(panel.find("[data-testid=plan-facts]").exists()).toBe(true);
    panel.unmount();
  });
});
