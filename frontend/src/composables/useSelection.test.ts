import { afterEach, describe, expect, it, vi } from "vitest";
import { nextTick } from "vue";

/** The selection of a page that was opened at `address`: the module reads it once. */
async function openedAt(address: string) {
  vi.resetModules();
  window.history.replaceState(null, "", address);
  const { useSelection } = await import("./useSelection");
  return useSelection();
}

afterEach(() => window.history.replaceState(null, "", "/"));

describe("useSelection", () => {
  it("begins with the address", async () => {
    const { selection } = await openedAt("/?step=84&rank=2&span=7&metric=wait");
    expect(selection.value).toMatchObject({ step: 84, rank: 2, span: 7, metric: "wait" });
  });

  it("drops the span when another step is selected, unless it is given with it", async () => {
    const { selection, select } = await openedAt("/?step=84&span=7");
    select({ step: 84, rank: 1 });
    expect(selection.value).toMatchObject({ span: 7, rank: 1 });
    select({ step: 85 });
    expect(selection.value).toMatchObject({ step: 85, span: null });
    select({ step: 86, span: 3 });
    expect(selection.value).toMatchObject({ step: 86, span: 3 });
  });

  it("clears rank, step and span, and keeps the metric and the page", async () => {
    const { selection, select, clear } = await openedAt("/?page=job&step=84&rank=2&span=7");
    select({ metric: "compute" });
    clear();
    expect(selection.value).toMatchObject({ step: null, rank: null, span: null });
    expect(selection.value).toMatchObject({ metric: "compute", page: "job" });
  });

  it.each([
    ["another step", { step: 85 }, 1],
    ["another page", { page: "jobs" }, 1],
    ["another run", { run: "0123456789ab" }, 1],
    ["a rank", { rank: 3 }, 0],
    ["a metric", { metric: "wait" }, 0],
    ["no step", { step: null }, 0],
    ["what is selected already", { step: 84 }, 0],
  ] as const)("adds to the history for %s as often as Back should return: %o", async (_, change, entries) => {
    const { select } = await openedAt("/?step=84");
    const push = vi.spyOn(window.history, "pushState");
    select(change);
    await nextTick();
    expect(push).toHaveBeenCalledTimes(entries);
    for (const [name, value] of Object.entries(change))
      expect(new URLSearchParams(window.location.search).get(name)).toBe(
        value === null ? null : String(value),
      );
  });

  it("follows Back, and adds nothing to the history for it", async () => {
    const { selection } = await openedAt("/?step=84");
    const push = vi.spyOn(window.history, "pushState");
    window.history.replaceState(null, "", "/?step=12&rank=1");
    window.dispatchEvent(new PopStateEvent("popstate"));
    await nextTick();
    expect(selection.value).toMatchObject({ step: 12, rank: 1 });
    expect(push).not.toHaveBeenCalled();
  });

  it("is one for all panels, which cannot write to it directly", async () => {
    const { selection, select } = await openedAt("/");
    const { useSelection } = await import("./useSelection");
    const other = useSelection();
    select({ rank: 5 });
    expect(other.selection.value.rank).toBe(5);
    vi.spyOn(console, "warn").mockImplementation(() => undefined);
    (selection as { value: object }).value = {};
    expect(other.selection.value.rank).toBe(5);
  });
});
