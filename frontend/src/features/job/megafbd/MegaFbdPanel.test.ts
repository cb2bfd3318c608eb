import { flushPromises, mount, type VueWrapper } from "@vue/test-utils";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { defineComponent, h } from "vue";
import { ApiClient } from "../../../api/client";
import { provideJob } from "../../../composables/useJob";
import { rolesOf } from "../../../store/testRoles";
import MegaFbdPanel from "./MegaFbdPanel.vue";

class SilentSocket {
  close(): void {
    return undefined;
  }
}

/** The panel of a job whose hub gives these answers about its roles, one after another. */
function panelOf(...answers: (() => Response)[]): VueWrapper {
  const client = new ApiClient((input) => {
    if (String(input) !== "api/v1/forward-backward") return new Promise(() => undefined);
    const [answer] = answers.length > 1 ? answers.splice(0, 1) : answers;
    return Promise.resolve((answer ?? (() => new Response(null, { status: 500 })))());
  });
  return mount(
    defineComponent(() => {
      provideJob(client);
      return () => h(MegaFbdPanel);
    }),
    { global: { stubs: { LineChart: true } } },
  );
}

beforeEach(() => vi.stubGlobal("WebSocket", SilentSocket));
afterEach(() => vi.unstubAllGlobals());

describe("the panel of MegaFBD", () => {
  it("shows mode and ratio, cost of the modes, balance, waits, ranks and shipments", async () => {
    const panel = panelOf(() => Response.json(rolesOf()));
    await flushPromises();
    expect(panel.get("[data-testid=ship-facts]").text()).toContain("since step 5");
    expect(panel.get("[data-testid=advice]").text()).toContain("backwardPerForward: 3");
    const modes = panel.findAll("[data-testid=modes] tbody tr").map((row) => row.text());
    expect(modes).toHaveLength(3);
    expect(modes[1]).toContain("selective (in force)");
    const [forward, backward] = panel.findAll("[data-testid=roles] li");
    expect(forward?.text()).toContain("50 % busy");
    expect(backward?.get("b").attributes("style")).toContain("width: 80%");
    const [busy, waits] = panel.findAll("line-chart-stub");
    expect(busy?.attributes("label")).toContain("forward 50 %, backward 80 %");
    expect(waits?.attributes("label")).toContain("for shipments 2.00 ms");
    expect(panel.get("[data-testid=data-table]").text()).toContain("rank 1");
    expect(panel.get("[data-testid=shipments] tbody").text()).toContain("shared memory");
    panel.unmount();
  });

  it("shows what is measured of ranks that publish nothing", async () => {
    const panel = panelOf(() => Response.json(rolesOf({ state: null })));
    await flushPromises();
    expect(panel.find("[data-testid=ship-facts]").exists()).toBe(false);
    expect(panel.findAll("[data-testid=roles] li")).toHaveLength(2);
    panel.unmount();
  });

  it("says that no step is there before the first one", async () => {
    const empty = { state: null, steps: [], roles: [], transfers: [] };
    const panel = panelOf(() => Response.json(rolesOf(empty)));
    await flushPromises();
    expect(panel.text()).toContain("No step of both roles yet");
    panel.unmount();
  });

  it("shows an error with what to do, and tries again", async () => {
    const problem = { code: "x", message: "the hub is full", hint: "Empty it." };
    const panel = panelOf(
      () => Response.json(problem, { status: 500 }),
      () => Response.json(rolesOf()),
    );
    await flushPromises();
    expect(panel.get("[role=alert]").text()).toContain("Empty it.");
    await panel.get("[role=alert] button").trigger("click");
    await flushPromises();
    expect(panel.find("[data-testid=ship-facts]").exists()).toBe(true);
    panel.unmount();
  });
});
