import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { METRICS } from "../api/types";
import * as format from "./format";
import { layoutText, tracerText } from "./jobText";
import { formatSelection, NOTHING, parseSelection, SCOPE_VIEWS, type Selection } from "./selection";

describe("format", () => {
  it.each([
    [format.seconds(1.234), "1.23 s"],
    [format.seconds(0.0843), "84.3 ms"],
    [format.seconds(2.5e-6), "2.50 µs"],
    [format.seconds(250), "250 s"],
    [format.seconds(0), "0 s"],
    [format.duration(59.6), "1 min 0 s"],
    [format.duration(4000), "1 h 6 min"],
    [format.duration(200_000), "2 d 7 h"],
    [format.integer(12345.6), "12,346"],
    [format.compact(12345), "12.3k"],
    [format.compact(2_500_000), "2.50M"],
    [format.compact(7.25), "7.25"],
    [format.loss(2.17349), "2.1735"],
    [format.ratio(2.958), "2.96×"],
    [format.ratio(12.34), "12.3×"],
    [format.percent(0.314), "31 %"],
    [format.bytes(1536), "1.50 KiB"],
    [format.bytes(12), "12 B"],
    [format.secondsTick(0.02, 0.01), "20 ms"],
    [format.secondsTick(3, 1), "3 s"],
    [format.secondsTick(1, 0.5), "1.0 s"],
    [format.secondsTick(2e-6, 1e-6), "2 µs"],
    [format.rankList([2]), "rank 2"],
    [format.rankList([1, 2, 5]), "ranks 1, 2 and 5"],
  ])("%s", (found, expected) => {
    expect(found).toBe(expected);
  });

  it("shows a dash for what is absent or no number", () => {
    const functions = [
      format.seconds,
      format.duration,
      format.integer,
      format.compact,
      format.loss,
      format.ratio,
      format.percent,
      format.bytes,
      format.clock,
    ];
    for (const show of functions)
      for (const value of [null, undefined, Number.NaN]) expect(show(value)).toBe("–");
  });
});

describe("job text", () => {
  const layout = { tensor: 1, pipeline: 2, virtualPipeline: 1, data: 2, context: 1, expert: 1 };

  it("names the axes that are in use", () => {
    expect(layoutText(layout)).toBe("PP2 × DP2");
    expect(layoutText({ ...layout, pipeline: 1, data: 1 })).toBe("one rank");
  });

  it("says whether the trace is whole", () => {
    const tracer = { state: "ok" as const, lost: 0, rings: 4, agents: 2, missingRanks: [], lagSeconds: 0.12 };
    expect(tracerText(tracer)).toMatchObject({ text: "complete", note: "120 ms behind", look: "good" });
    expect(tracerText({ ...tracer, state: "lossy", lost: 1200 })).toMatchObject({
      text: "1,200 lost",
      look: "warn",
    });
    expect(tracerText({ ...tracer, missingRanks: [2, 3] })).toMatchObject({
      text: "2 ranks missing",
      look: "warn",
    });
    expect(tracerText({ ...tracer, state: "off" }).look).toBe("off");
  });
});

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
    view: fc.constantFrom(...SCOPE_VIEWS),
    prompt: fc.nat(7),
    token: number,
    layer: number,
    head: number,
  });

  it("comes back as it went", () => {
    fc.assert(
      fc.property(selections, (selection) => {
        const expected = selection.step === null ? { ...selection, span: null } : selection;
        expect(parseSelection(formatSelection(selection))).toEqual(expected);
      }),
    );
  });

  it("takes whatever a person typed", () => {
    expect(parseSelection("?step=-3&rank=x&metric=nothing&page=9&span=1e3&job=../x")).toEqual(NOTHING);
    expect(formatSelection(NOTHING)).toBe("");
    expect(formatSelection({ ...NOTHING, step: 84, rank: 2, metric: "wait" })).toBe(
      "?step=84&rank=2&metric=wait",
    );
  });
});
