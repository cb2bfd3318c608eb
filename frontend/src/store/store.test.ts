import { describe, expect, it } from "vitest";
import type { Heatmap, Verdict } from "../api/types";
import { position, SeriesStore } from "./seriesStore";
import { StepStore, type StepsHeader } from "./stepStore";
import { durations, rankShare, valueDomain } from "./stepViews";
import { activeVerdicts, costFigures, costOf, subjectName, suspectRanks } from "./verdicts";

const heatmap = (change: Partial<Heatmap> = {}): Heatmap => ({
  metric: "compute",
  attempts: [0, 0],
  steps: [4, 5],
  ranks: [0, 1],
  values: [
    [0.1, 0.2],
    [0.3, null],
  ],
  ...change,
});
const header = (change: Partial<StepsHeader> = {}): StepsHeader => ({
  attempt: 0,
  steps: [6],
  startsNs: [0],
  durationsNs: [2.5e8],
  ranks: [0, 1],
  metrics: ["compute", "wait"],
  ...change,
});

describe("StepStore", () => {
  it("joins history and live frames into one matrix with a column for every step", () => {
    const store = new StepStore();
    store.addHeatmap(heatmap());
    store.addFrame(header({ steps: [7] }), new Float32Array([0.5, 0.6, 0.7, 0.8]));
    const { steps, ranks, values } = store.matrix("compute", 4, 7);
    expect(steps).toEqual([4, 5, 6, 7]);
    expect(ranks).toEqual([0, 1]);
    const missing = Number.NaN;
    expect([...values].map((value) => +value.toFixed(3))).toEqual([
      0.1,
      0.2,
      missing,
      0.5,
      0.3,
      missing,
      missing,
      0.6,
    ]);
    expect(store.value("wait", 1, 7)).toBeCloseTo(0.8);
    expect(store.durationOf(7)).toBe(0.25);
    expect(store.value("compute", 1, 5)).toBeUndefined();
  });

  it("lets a newer attempt replace a step and refuses an older one", () => {
    const store = new StepStore();
    store.addSteps([{ attempt: 1, step: 4, startNs: 0, durationNs: 1e9, complete: true }]);
    store.addHeatmap(heatmap());
    expect(store.value("compute", 0, 4)).toBeUndefined();
    expect(store.value("compute", 0, 5)).toBeCloseTo(0.2);
    store.addFrame(header({ attempt: 2, steps: [5], metrics: ["compute"] }), new Float32Array([9, 8]));
    expect(store.value("compute", 0, 5)).toBe(9);
    expect(store.attemptOf(5)).toBe(2);
  });

  it("makes room for ranks that come up later", () => {
    const store = new StepStore();
    store.addHeatmap(heatmap({ ranks: [1, 3] }));
    store.addFrame(header({ ranks: [0, 1, 2, 3], metrics: ["compute"] }), new Float32Array([1, 2, 3, 4]));
    expect(store.ranks).toEqual([0, 1, 2, 3]);
    expect(store.value("compute", 3, 4)).toBeCloseTo(0.3);
    expect(store.value("compute", 0, 4)).toBeUndefined();
    expect(store.value("compute", 3, 6)).toBe(4);
  });

  it("keeps steps in order whatever order they come in, and lets the oldest go", () => {
    const store = new StepStore(3);
    for (const step of [9, 2, 7, 5]) {
      store.addSteps([{ attempt: 0, step, startNs: 0, durationNs: step * 1e9, complete: true }]);
    }
    expect(store.steps).toEqual([5, 7, 9]);
    expect(durations(store).values).toEqual([5, 7, 9]);
    expect(store.durationOf(2)).toBeUndefined();
  });
});

describe("views of steps", () => {
  it("give the newest steps of a rank as shares", () => {
    const store = new StepStore();
    const metrics = ["compute", "wait", "step", "slowdown"];
    store.addFrame(
      header({ steps: [1, 2, 3], durationsNs: [1e9, 1e9, 1e9], ranks: [0], metrics }),
      new Float32Array([0.5, 0.6, 0.7, 0.1, 0.2, 0.3, 1, 1, 1, 2, 3, 4]),
    );
    const share = rankShare(store, 0, 3);
    expect(share.compute).toBeCloseTo(0.6);
    expect(share.wait).toBeCloseTo(0.2);
    expect(share.slowdown).toBe(3);
    expect(valueDomain(store, "compute", 1, 2).high).toBeCloseTo(0.6);
    expect(rankShare(store, 5, 3)).toEqual({ compute: 0, wait: 0, slowdown: undefined });
  });
});

describe("SeriesStore", () => {
  it("merges points that come twice and out of order", () => {
    const series = new SeriesStore();
    series.add("loss", { attempts: [0, 0, 0], steps: [1, 2, 4], values: [9, 8, 6] });
    series.add("loss", { attempts: [0, 1, 0], steps: [3, 2, 5], values: [7, 8.5, null] });
    series.add("loss", { attempts: [0], steps: [2], values: [1] });
    expect(series.curve("loss")).toEqual({
      steps: [1, 2, 3, 4],
      values: [9, 8.5, 7, 6],
      attempts: [0, 1, 0, 0],
    });
  });

  it("is bounded", () => {
    const series = new SeriesStore(2);
    series.add("loss", { attempts: [0, 0, 0], steps: [1, 2, 3], values: [1, 2, 3] });
    expect(series.curve("loss").steps).toEqual([2, 3]);
  });

  it("finds positions", () => {
    expect([0, 1, 2, 3, 9].map((value) => position([1, 2, 4], value))).toEqual([0, 0, 1, 2, 3]);
  });
});

const verdict = (change: Partial<Verdict>): Verdict => ({
  id: "a",
  subject: { type: "rank", ranks: [2], worker: 1, node: "node-1" },
  cause: "compute",
  state: "confirmed",
  effect: { secondsPerStep: 0.1, slowdown: 3 },
  confidence: 0.97,
  evidence: { steps: [50], text: [] },
  since: { attempt: 0, step: 40, time: 0 },
  until: null,
  sentence: "",
  ...change,
});

describe("verdicts", () => {
  it("come with the gravest first and without what is over", () => {
    const list = [
      verdict({ id: "suspected", state: "suspect", effect: { secondsPerStep: 9, slowdown: 2 } }),
      verdict({ id: "over", state: "cleared" }),
      verdict({ id: "dear", effect: { secondsPerStep: 0.4, slowdown: 2 } }),
      verdict({ id: "cheap" }),
      verdict({ id: "hung", cause: "hang", effect: { secondsPerStep: 0, slowdown: null } }),
    ];
    expect(activeVerdicts(list).map(({ id }) => id)).toEqual(["hung", "dear", "cheap", "suspected"]);
  });

  it("mark the ranks they name", () => {
    const link = verdict({
      subject: { type: "link", ranks: [1, 3], worker: null, node: null },
      cause: "link",
    });
    expect([
      ...suspectRanks([
        link,
        verdict({ state: "cleared", subject: { type: "rank", ranks: [7], worker: 0, node: "" } }),
      ]),
    ]).toEqual([1, 3]);
    expect(subjectName(link)).toBe("Link 1 → 3");
  });

  it("cost what they cost up to now, or up to their end", () => {
    expect(costOf(verdict({}), 49, 0.3)).toEqual({
      perStepS: 0.1,
      longer: expect.closeTo(0.5),
      stepsSoFar: 10,
      totalS: 1,
    });
    const over = verdict({ until: { attempt: 0, step: 44, time: 0 } });
    expect(costOf(over, 900, undefined)).toMatchObject({ stepsSoFar: 5, longer: undefined });
    expect(
      costFigures(verdict({}), costOf(verdict({}), 40, 0.3)).map(({ value, name }) => `${value} ${name}`),
    ).toEqual(["3.00× as long as expected", "+100 ms on every step (+50 %)", "100 ms lost in 1 step"]);
    const hung = verdict({ cause: "hang", effect: { secondsPerStep: 75, slowdown: 1 } });
    expect(costFigures(hung, costOf(hung, 49, 0.3))).toEqual([
      { value: "1 min 15 s", name: "without progress" },
    ]);
  });
});
