import { flushPromises, mount, type VueWrapper } from "@vue/test-utils";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { h, ref, shallowRef } from "vue";
import { ApiError } from "../../../api/client";
import { DEFAULT_CAPTURE, type Capture, type RunHeader } from "../../../scope/protocol";
import { provideAs, type ScopeApi } from "../useScope";
import { provideRunForm, type RunForm } from "./useRunForm";

const RUN = "0123456789ab";
const [FIRST, SECOND] = [
  { layer: 0, head: 1 },
  { layer: 1, head: 0 },
];
/** As a script requests it: the form of the page has none of this. */
const OF_SCRIPT: Capture = {
  ...DEFAULT_CAPTURE,
  states: { ...DEFAULT_CAPTURE.states, mlp1: false },
  pixels: { qkv: 12, mlp: 8 },
  expression: { qkv: "data.amax(dim=-1)", mlp: "data.std(dim=-1)" },
  rotary: "before",
  pinned: [FIRST],
  candidates: 5,
};

let form: RunForm;
let view: VueWrapper;
const version = ref(0);
const run = shallowRef<{ header: RunHeader } | null>(null);
const setCapture = vi.fn<(name: string, capture: Capture) => Promise<void>>();
/** The hub's newest header of the run. */
function told(state: RunHeader["state"], capture: Capture): void {
  run.value = { header: { run: RUN, state, capture } };
  version.value += 1;
}

const Form = { setup: () => ((form = provideRunForm()), () => null) };
const Screen = {
  setup: () => {
    provideAs({ version, run, client: { setCapture } } as unknown as ScopeApi);
    return () => h(Form);
  },
};

beforeEach(() => {
  sessionStorage.clear();
  setCapture.mockReset().mockResolvedValue(undefined);
  told("decoding", OF_SCRIPT);
  view = mount(Screen);
});
afterEach(() => view.unmount());

describe("pins of an active run", () => {
  it("are its own, and a press changes nothing else of its capture", async () => {
    expect(form.pinned.value).toEqual([FIRST]);
    await form.pin(SECOND);
    expect(setCapture.mock.lastCall).toEqual([RUN, { ...OF_SCRIPT, pinned: [FIRST, SECOND] }]);
    told("decoding", { ...OF_SCRIPT, pinned: [FIRST, SECOND] });
    await form.pin(FIRST);
    expect(setCapture.mock.lastCall).toEqual([RUN, { ...OF_SCRIPT, pinned: [SECOND] }]);
  });

  it("add up before the run's header has arrived", async () => {
    void form.pin(SECOND);
    await form.pin(FIRST);
    expect(setCapture.mock.lastCall?.[1]).toEqual({ ...OF_SCRIPT, pinned: [SECOND] });
    expect(form.pinned.value).toEqual([SECOND]);
  });

  it("stay as they are where the hub refuses others", async () => {
    setCapture.mockRejectedValueOnce(new ApiError(422, "no such head", ""));
    await form.pin(SECOND);
    expect([form.problem.value?.message, form.pinned.value]).toEqual(["no such head", [FIRST]]);
    expect(form.draft.capture.pinned).toEqual([]);
  });

  it("outlast a change of a field, until a preset without rows is chosen", async () => {
    form.draft.capture.states.pca = false;
    await form.applyCapture();
    const sent = setCapture.mock.lastCall?.[1];
    expect([sent?.pinned, sent?.states.pca, sent?.rotary]).toEqual([[FIRST], false, "before"]);
    form.draft.capture.preset = "lite";
    await form.applyCapture();
    expect(setCapture.mock.lastCall?.[1].pinned).toEqual([]);
  });

  it("are pinned in the next run, too, if they were pinned by hand", async () => {
    await form.pin(SECOND);
    told("done", { ...OF_SCRIPT, pinned: [FIRST, SECOND] });
    expect(form.pinned.value).toEqual([SECOND]);
  });
});

it("heads that are pinned before a run are sent with it only", async () => {
  told("done", OF_SCRIPT);
  await form.pin(FIRST);
  await form.pin(SECOND);
  await form.pin(FIRST);
  await flushPromises();
  expect([form.pinned.value, setCapture.mock.calls]).toEqual([[SECOND], []]);
});
