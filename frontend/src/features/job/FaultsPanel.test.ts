import { flushPromises, mount } from "@vue/test-utils";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { defineComponent, h } from "vue";
import { ApiClient } from "../../api/client";
import { provideJob } from "../../composables/useJob";
import FaultsPanel from "./FaultsPanel.vue";

class SilentSocket {
  close(): void {
    return undefined;
  }
}
beforeEach(() => vi.stubGlobal("WebSocket", SilentSocket));
afterEach(() => vi.unstubAllGlobals());

const FAULT = { id: "fault-1", rank: 0, kind: "compute", factor: 3, fromStep: 5, steps: 9, peer: null };
const JOB = { name: "demo", attempt: 0, ranks: [{ rank: 0, state: "training", step: 3 }], faults: [FAULT] };

it.each([
  ["a controller injects and ends them", undefined, ["DELETE api/v1/faults/fault-1"]],
  ["a viewer cannot, and sees why", "Needs the controller role", []],
])("faults: %s", async (_, viewOnly, wanted) => {
  const changes: string[] = [];
  const client = new ApiClient((input, init) => {
    if (init?.method) changes.push(`${init.method} ${String(input)}`);
    const answers: Readonly<Record<string, unknown>> = { "api/v1/job": JOB, "api/v1/verdicts": [] };
    const answer = answers[String(input)] ?? (init?.method ? FAULT : undefined);
    return answer ? Promise.resolve(Response.json(answer)) : new Promise(() => undefined);
  });
  const page = mount(
    defineComponent(() => {
      provideJob(client).viewOnly.value = viewOnly;
      return () => h(FaultsPanel);
    }),
  );
  await flushPromises();
  for (const name of ["Inject", "End"]) {
    const button = page.findAll("button").find((one) => one.text() === name);
    expect(button?.attributes("disabled") !== undefined).toBe(viewOnly !== undefined);
    expect(button?.attributes("title")).toBe(viewOnly);
    await button?.trigger("click");
  }
  expect(changes).toEqual(wanted);
  page.unmount();
});
