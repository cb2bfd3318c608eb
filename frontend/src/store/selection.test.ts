import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { METRICS } from "../api/types";
import { formatSelection, NOTHING, parseSelection, SCOPE_VIEWS, SIDES, type Selection } from "./selection";

describe("selection in the URL", () => {
  const number = fc.option(fc.nat(1e9));
  const selections: fc.Arbitrary<Selection> = fc.record({
    job: fc.constantFrom("team/demo", "a/b-2", null),
    step: number,
    rank: number,
    span: number,
    metric: fc.constantFrom(...METRICS),
    page: fc.constantFrom("job" as const, "jobs" as const, "scope" as const, null),
    run: fc.constantFrom("0123456789ab", null),
    with: fc.constantFrom("ba9876543210", null),
    file: fc.constantFrom("a b.scope", null),
    side: fc.constantFrom(...SIDES),
    view: fc.constantFrom(...SCOPE_VIEWS),
    prompt: fc.nat(7),
    token: number,
    layer: number,
    head: number,
  });

  it("comes back as it went", () => {
    fc.assert(
      fc.property(selections, (selection) => {
        const span = selection.step === null ? null : selection.span;
        const expected = { ...selection, span, file: selection.with === null ? null : selection.file };
        expect(parseSelection(formatSelection(selection))).toEqual(expected);
      }),
    );
  });

  it("keeps the rank with its layer and head", () => {
    const selection = { ...NOTHING, page: "scope", rank: 3, layer: 2, head: 1 } as const;
    expect(parseSelection(formatSelection(selection))).toEqual(selection);
  });

  it("takes whatever a person typed", () => {
    expect(parseSelection("?step=-3&rank=x&metric=nothing&page=9&span=1e3&job=../x")).toEqual(NOTHING);
    expect(formatSelection(NOTHING)).toBe("");
    expect(formatSelection({ ...NOTHING, step: 84, rank: 2, metric: "wait" })).toBe(
      "?step=84&rank=2&metric=wait",
    );
  });
});
