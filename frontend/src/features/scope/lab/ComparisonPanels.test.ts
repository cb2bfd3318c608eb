import { mount } from "@vue/test-utils";
import { expect, it } from "vitest";
import { computed, ref, shallowRef } from "vue";
import ComparisonPanels, { type Comparison } from "./ComparisonPanels.vue";

const recipe = (digest: string) => ({ digest, recipe: {} });

it.each([
  [null, recipe("b1"), "012345: b1, free, done", "A: the model as it is; B: with the recipe"],
  [
    recipe("a1"),
    recipe("b1"),
    "012345: b1 against a1, free, done",
    "A: with the recipe a1; B: with the recipe",
  ],
  [
    recipe("a1"),
    null,
    "012345: the model as it is against a1, free, done",
    "A: with the recipe a1; B: the model as it is",
  ],
])("names both branches of a comparison", (baseline, perturbation, title, note) => {
  const one = {
    comparison: "0123456789ab",
    ...{ baseline, perturbation, mode: "free", state: "done" },
    ...{ rows: [], drift: [], heads: null, firstDivergence: null, compared: 0, tokens: 1, error: null },
  } as unknown as Comparison;
  const nothing = () => Promise.resolve(undefined);
  const view = mount(ComparisonPanels, {
    props: {
      branches: {
        ...{
          list: shallowRef([one]),
          shown: shallowRef(one),
          problem: computed(() => null),
          busy: ref(false),
        },
        ...{ follow: nothing, start: () => Promise.resolve(null), cancel: nothing, csv: String },
      },
      disabled: false,
    },
    global: { stubs: { MatrixPanel: true } },
  });
  expect([view.get("li").text(), view.get(".note").text()]).toEqual([title, note]);
  view.unmount();
});
