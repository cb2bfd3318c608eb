import { flushPromises, shallowMount, type VueWrapper } from "@vue/test-utils";
import { afterAll, afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { ApiClient } from "../../../api/client";
import type { Hello } from "../../../scope/protocol";
import ComparisonPanels from "./ComparisonPanels.vue";
import LabView from "./LabView.vue";
import RecipeBuilder from "./RecipeBuilder.vue";
import RecipeList from "./RecipeList.vue";

const [X, Y] = ["0000000000aa", "0000000000bb"];
const HELLO = { model: { layers: 1 } } as unknown as Hello;
interface Asked {
  readonly method: string;
  readonly address: string;
}

let root = "";
let asked: Asked[] = [];
/** Status and body of an answer. */
let answer: (given: Asked) => readonly [number, unknown];
const open: VueWrapper[] = [];

// Files share their modules: here none has loaded what is replaced below, and no other file gets the replacements.
vi.hoisted(() => vi.resetModules());
vi.mock("../useScope", () => ({
  useScope: () => ({
    client: {
      api: new ApiClient((input, init) => {
        const given = { method: init?.method ?? "GET", address: String(input) };
        asked.push(given);
        const [status, body] = answer(given);
        if (status === 0) return Promise.reject(new TypeError("no network"));
        return Promise.resolve(new Response(JSON.stringify(body), { status }));
      }, root),
    },
  }),
}));
vi.mock("../generate/useRunForm", () => ({
  useRunForm: () => ({ draft: { prompts: ["a"], tokens: 1, sampling: {} }, busy: { value: false } }),
}));

const comparison = (name: string, state = "done") => ({
  comparison: name,
  state,
  perturbation: { digest: `digest of ${name}` },
});
const refused = (status: number, message: string) => [status, { code: "x", message, hint: "" }] as const;
/** A hub with these comparisons, newest first. */
const hubOf =
  (...known: readonly ReturnType<typeof comparison>[]): typeof answer =>
  ({ method, address }) => {
    if (method !== "GET") return refused(429, "4 comparisons are open already");
    if (!address.includes("comparisons/")) return [200, known];
    const found = known.find((one) => address.includes(one.comparison));
    return found ? [200, found] : refused(404, "there is no comparison");
  };

async function lab(hub = "api/v1/"): Promise<VueWrapper> {
  root = hub;
  const view = shallowMount(LabView, { props: { hello: HELLO, why: null } });
  open.push(view);
  await flushPromises();
  return view;
}
/** What the panel of comparisons gets. */
function branchesOf(view: VueWrapper) {
  const { branches } = view.findComponent(ComparisonPanels).props();
  return {
    problem: () => branches.problem.value,
    shown: () => branches.shown.value?.comparison ?? null,
    follow: branches.follow,
    cancel: branches.cancel,
  };
}
const reads = (name: string): number => asked.filter(({ address }) => address.includes(name)).length;
async function compare(view: VueWrapper): Promise<void> {
  const list = view.findComponent(RecipeList);
  list.vm.$emit("compare", list.props("modelValue"));
  await flushPromises();
}

beforeEach(() => {
  vi.useFakeTimers();
  [root, asked, answer] = ["api/v1/", [], hubOf(comparison(X))];
});
afterEach(() => {
  for (const view of open.splice(0)) view.unmount();
  vi.useRealTimers();
});
afterAll(() => vi.resetModules());

describe("the perturbation lab", () => {
  it("stores a recipe of each hub", async () => {
    const first = await lab("api/v1/jobs/a/b/");
    first.findComponent(RecipeBuilder).vm.$emit("add", { kind: "system" });
    first.unmount();
    const changes = (view: VueWrapper): number =>
      view.findComponent(RecipeList).props("modelValue").perturbations.length;
    expect(changes(await lab("api/v1/jobs/a/c/"))).toBe(0);
    expect(changes(await lab("api/v1/jobs/a/b/"))).toBe(1);
  });

  it("names the digest of a recipe after its own comparison only", async () => {
    const view = await lab();
    expect(branchesOf(view).shown()).toBe(X);
    await compare(view);
    expect(branchesOf(view).problem()).toBe("4 comparisons are open already.");
    expect(view.findComponent(RecipeList).props("digest")).toBeNull();
    const hub = hubOf(comparison(Y), comparison(X));
    answer = (given) => (given.method === "POST" ? [201, { comparison: Y }] : hub(given));
    await compare(view);
    expect(branchesOf(view).problem()).toBeNull();
    expect(view.findComponent(RecipeList).props("digest")).toBe(`digest of ${Y}`);
  });

  it("shows why an order was refused while a comparison is read on", async () => {
    answer = hubOf(comparison(X, "running"));
    const view = await lab();
    await branchesOf(view).cancel(X);
    await vi.advanceTimersByTimeAsync(1000);
    expect(reads(X)).toBeGreaterThan(2);
    expect(branchesOf(view).problem()).toBe("4 comparisons are open already.");
  });

  it("reads one that does not exist once, and the list again", async () => {
    answer = hubOf(comparison(X, "running"));
    const view = await lab();
    const lists = (): number => asked.filter(({ address }) => address.endsWith("comparisons")).length;
    const before = lists();
    await branchesOf(view).follow(Y);
    await vi.advanceTimersByTimeAsync(10_000);
    expect([reads(Y), lists() - before]).toEqual([1, 1]);
    expect(branchesOf(view).problem()).toBe("there is no comparison.");
  });

  it.each([0, 503])("reads the one that was chosen again after status %d", async (status) => {
    const view = await lab();
    const hub = hubOf(comparison(Y), comparison(X));
    answer = (given) => (given.address.includes(Y) ? refused(status, "restarting") : hub(given));
    await branchesOf(view).follow(Y);
    expect(branchesOf(view).problem()).not.toBeNull();
    answer = hub;
    await vi.advanceTimersByTimeAsync(3000);
    expect([branchesOf(view).shown(), branchesOf(view).problem()]).toEqual([Y, null]);
  });
});
