import { flushPromises, mount } from "@vue/test-utils";
import { expect, it, vi } from "vitest";
import { h, ref, shallowRef } from "vue";
import { DEFAULT_CAPTURE, type Head } from "../../../scope/protocol";
import { provideRunForm, type RunForm } from "../generate/useRunForm";
import { provideAs, type ScopeApi } from "../useScope";
import AttentionTab from "./AttentionTab.vue";
import HeadAtlas from "./HeadAtlas.vue";

const [FIRST, SECOND]: readonly Head[] = [
  { layer: 0, head: 1 },
  { layer: 1, head: 0 },
];

it.each([
  ["a viewer sees those of an active run", "decoding", "You may only view.", [FIRST]],
  ["a viewer sees those of a run that has ended", "done", "You may only view.", [FIRST]],
  ["a controller sees those of an active run, and what was pressed", "decoding", null, [FIRST, SECOND]],
  ["a controller sees those of the next run", "done", null, [SECOND]],
])("pins: %s", async (_, state, why, pinned) => {
  const capture = { ...DEFAULT_CAPTURE, pinned: [FIRST] };
  const scope = {
    ...{ version: ref(0), runId: ref("r"), hello: ref(null) },
    run: shallowRef({ header: { run: "r", state, capture }, samples: [] }),
    client: { setCapture: vi.fn(() => Promise.resolve()) },
  } as unknown as ScopeApi;
  let form: RunForm | undefined;
  const Form = { setup: () => ((form = provideRunForm()), () => h(AttentionTab, { why })) };
  const Screen = { setup: () => (provideAs(scope), () => h(Form)) };
  const view = mount(Screen, {
    global: { stubs: { HeadAtlas: true, AttentionMap: true, HeadScoresPanel: true } },
  });
  const atlas = view.findComponent(HeadAtlas);
  atlas.vm.$emit("pin", SECOND);
  await flushPromises();
  expect(atlas.props("pinned")).toEqual(pinned);
  expect(form?.draft.capture.pinned).toEqual(why === null ? [SECOND] : []);
  view.unmount();
});
