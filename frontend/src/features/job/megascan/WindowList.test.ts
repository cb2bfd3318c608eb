import { flushPromises, mount } from "@vue/test-utils";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { defineComponent, h } from "vue";
import { ApiClient } from "../../../api/client";
import { provideJob } from "../../../composables/useJob";
import type { TraceWindow } from "./megascanApi";
import WindowList from "./WindowList.vue";

class SilentSocket {
  close(): void {
    return undefined;
  }
}
beforeEach(() => vi.stubGlobal("WebSocket", SilentSocket));
afterEach(() => vi.unstubAllGlobals());

const WINDOW: TraceWindow = {
  id: "window-3",
  fromStep: 12,
  steps: 3,
  granularity: "full",
  ranks: [3, 4],
  reason: null,
};

/** The list, at a hub that cancels a window, or answers with a problem. */
async function listed(problem: object | null, viewOnly?: string) {
  const requests: string[] = [];
  let windows = [WINDOW];
  const client = new ApiClient((input, init) => {
    const path = String(input);
    if (init?.method === "DELETE") {
      requests.push(path);
      if (problem) return Promise.resolve(Response.json(problem, { status: 403 }));
      windows = [];
      return Promise.resolve(new Response(null, { status: 204 }));
    }
    return path.startsWith("api/v1/trace/windows")
      ? Promise.resolve(Response.json(windows))
      : new Promise(() => undefined);
  });
  const page = mount(
    defineComponent(() => {
      provideJob(client).viewOnly.value = viewOnly;
      return () => h(WindowList);
    }),
  );
  await flushPromises();
  return { page, requests };
}

describe("the list of windows", () => {
  it("says what each records, and cancels it", async () => {
    const { page, requests } = await listed(null);
    expect(page.text()).toContain("steps 12 to 14, parts of layers, tensor groups of ranks 3 and 4");
    await page.get("button").trigger("click");
    await flushPromises();
    expect(requests).toEqual(["api/v1/trace/windows/window-3"]);
    expect(page.find("[data-testid=trace-windows]").exists()).toBe(false);
    page.unmount();
  });

  it("has no use for a viewer, and says why", async () => {
    const { page, requests } = await listed(null, "Needs the controller role");
    const button = page.get("button");
    expect([button.attributes("disabled"), button.attributes("title")]).toEqual([
      "",
      "Needs the controller role",
    ]);
    await button.trigger("click");
    expect(requests).toEqual([]);
    page.unmount();
  });

  it("says why a window cannot be cancelled", async () => {
    const problem = {
      code: "needs-controller",
      message: "this needs the controller token",
      hint: "Ask for it.",
    };
    const { page } = await listed(problem);
    await page.get("button").trigger("click");
    await flushPromises();
    expect(page.get("[role=alert]").text()).toContain("this needs the controller token. Ask for it.");
    expect(page.text()).toContain("steps 12 to 14");
    page.unmount();
  });
});
