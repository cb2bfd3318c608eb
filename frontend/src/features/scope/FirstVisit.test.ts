import { mount } from "@vue/test-utils";
import { beforeEach, expect, it } from "vitest";
import FirstVisit from "./FirstVisit.vue";
import { isFirstVisit } from "./firstVisit";

beforeEach(() => localStorage.clear());
const caption = (mayGenerate: boolean, hasRuns: boolean): string =>
  mount(FirstVisit, { props: { mayGenerate, hasRuns } }).text();

it("names the step that this user can take", () => {
  expect(caption(true, false)).toContain("Press Generate");
  expect(caption(false, true)).toContain("Choose a run");
  expect(caption(false, false)).toContain("once someone generates");
});

it("is shown until it is hidden, and not at the next visit", async () => {
  const shown = mount(FirstVisit, { props: { mayGenerate: true, hasRuns: false } });
  expect(isFirstVisit()).toBe(true);
  await shown.get("button").trigger("click");
  expect(shown.text()).toBe("");
  expect(caption(true, false)).toBe("");
});
