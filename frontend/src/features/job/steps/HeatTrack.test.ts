import { mount } from "@vue/test-utils";
import { expect, it } from "vitest";
import { ref } from "vue";
import { useViewport } from "../../../composables/useViewport";
import { magnitudeMap } from "../../../render/colour";
import { StepStore } from "../../../store/stepStore";
import HeatTrack from "./HeatTrack.vue";

/** Attempt 0 ended with step 150; attempt 1 resumed after step 100 and has done two steps. */
function storeOf(): StepStore {
  const store = new StepStore();
  const [attempts, steps] = [
    [0, 0, 1, 1],
    [149, 150, 101, 102],
  ];
  store.addHeatmap({ metric: "compute", attempts, steps, ranks: [0, 1], values: [steps, steps] });
  return store;
}

it.each([
  ["starts at the newest step of the attempt that runs", "ArrowLeft", null, 101],
  ["starts at the selected step", "ArrowRight", 149, 150],
  ["reaches the highest step", "End", null, 150],
])("the cursor %s", async (_, key, selected, wanted) => {
  const limits = ref({ from: 100.5, to: 150.5, minimum: 8 });
  const track = mount(HeatTrack, {
    props: {
      store: storeOf(),
      version: 1,
      metric: "compute",
      map: magnitudeMap(0, 200),
      viewport: useViewport(() => limits.value),
      marks: { selected, hovered: null, verdicts: [], faults: [] },
      suspects: new Set<number>(),
      rank: 1,
      describe: (step: number, rank: number) => `step ${step}, rank ${rank}`,
    },
    global: { stubs: { PictureCanvas: true } },
  });
  await track.get("[data-testid=heatmap]").trigger("keydown", { key });
  expect(track.emitted("pick")).toEqual([[{ step: wanted, rank: 1 }]]);
  expect(track.get("[aria-live]").text()).toBe(`step ${wanted}, rank 1`);
});
