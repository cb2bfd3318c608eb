import { flushPromises, mount } from "@vue/test-utils";
import { expect, it, vi } from "vitest";
import { h, ref, shallowRef } from "vue";
import type { ScopeApi } from "../useScope";
import ScopeSide from "./ScopeSide.vue";
import SecondTokens from "./SecondTokens.vue";

it("requests the scores of run B's prompt, which B − A needs", async () => {
  const scores = vi.fn(() => Promise.resolve());
  const scope = {
    version: ref(0),
    runId: ref("b"),
    run: shallowRef({
      header: { run: "b", state: "done" },
      samples: [{ promptLength: 3, length: 3, row: () => null }],
    }),
    hello: ref({ source: "live", model: { layers: 1, heads: 1 } }),
    live: ref({ kind: "live" }),
    client: { scores },
  } as unknown as ScopeApi;
  const view = mount(ScopeSide, {
    props: { scope, side: "B" },
    slots: { default: () => h(SecondTokens) },
    global: { stubs: { TokenStrip: true } },
  });
  await flushPromises();
  expect(scores.mock.calls).toEqual([["b", 0, expect.any(AbortSignal)]]);
  view.unmount();
});
