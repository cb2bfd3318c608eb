import { describe, expect, it } from "vitest";
import type { RankView, Verdict } from "../../../api/types";
import { blamedRows, blameSentence, isSlow, victimText } from "./blameText";
import { comparedRows, rangeText, usualBefore } from "./compareText";
import { modelOf, type Blame, type SlowCell, type Slowdowns } from "./megascanApi";
import {
  cellPlaces,
  cellsOverSteps,
  gpuHours,
  gpuHoursText,
  linkCells,
  linkGrid,
  MOST_ROWS,
  placeGrid,
  slowFacts,
  stageName,
  stepsGrid,
  suspectColumns,
  suspectRows,
} from "./slowText";
import { timelineOf } from "../../../trace/testTimeline";
import { tracerFacts, workerCells } from "./tracerText";

const cell = (stage: number, replica: number, slowdown: number | null, steps: number[] = []): SlowCell => ({
  stage,
  replica,
  ranks: [stage * 2 + replica],
  slowdown,
  steps,
});
const slowdowns = (change: Partial<Slowdowns> = {}): Slowdowns => ({
  attempt: 0,
  peers: "work",
  steps: [7, 8],
  recordedSeconds: [0.3, 0.1],
  idealSeconds: [0.1, 0.1],
  slowdown: 2,
  cells: [cell(0, 0, 1, [1, 1]), cell(0, 1, 1, [1, 1]), cell(1, 0, 1.9, [2.8, 1]), cell(1, 1, null, [])],
  replicasPerCell: 1,
  launchRatio: 1.02,
  kinds: { grad_reduce: 1.6, forward: 1.1 },
  slowestFraction: 0.97,
  lastStageFraction: null,
  links: [],
  skippedSteps: 0,
  ...change,
});
const verdict = (change: Partial<Verdict> = {}): Verdict => ({
  id: "v1",
  subject: { type: "rank", ranks: [2], worker: 1, node: "node-1" },
  cause: "compute",
  state: "confirmed",
  stale: false,
  effect: { secondsPerStep: 0.5, secondsLost: 5, slowdown: 2 },
  confidence: 0.97,
  evidence: { steps: [11, 12], text: [] },
  since: { attempt: 0, step: 10, time: 0 },
  until: null,
  sentence: "",
  ...change,
});

describe("slowdowns", () => {
  it("are a grid of stages by replicas, and of cells by steps", () => {
    const view = slowdowns();
    expect(placeGrid(view, [])).toEqual({
      rows: ["stage 0", "stage 1"],
      columns: ["0", "1"],
      values: [
        [1, 1],
        [1.9, null],
      ],
    });
    const places = cellPlaces(view);
    expect(places.at(1, 0)?.ranks).toEqual([2]);
    expect(places.at(2, 0)).toBeUndefined();
    expect(view.cells.map((cell) => places.at(places.of(cell).row, places.of(cell).column))).toEqual(
      view.cells,
    );
    expect(stepsGrid(view, []).values[2]).toEqual([2.8, 1]);
  });

  it("name stages of roles by their own number", () => {
    const rank = { rank: 2, pp: 0, role: "backward" } as RankView;
    expect(stageName(cell(1, 0, 1), [rank])).toBe("B 0");
  });

  it("list over steps only the cells that were slowest at any step", () => {
    const many = Array.from({ length: MOST_ROWS + 8 }, (_, at) => cell(0, at, 1, [1, at === 3 ? 9 : 1]));
    const shown = cellsOverSteps(slowdowns({ cells: many }));
    expect(shown).toHaveLength(MOST_ROWS);
    expect(shown.map(({ replica }) => replica)).toContain(3);
  });

  it("are facts with what is unknown as a dash", () => {
    const facts = Object.fromEntries(slowFacts(slowdowns()));
    expect(facts["Step"]).toBe("200 ms, 100 ms if nothing were slow");
    expect(facts["GPU time lost"]).toBe("50 %");
    expect(facts["Launch delays make steps"]).toBe("1.02× as long");
    expect(facts["Of it by the last stage"]).toBe("–");
    expect(facts["Most of it in"]).toBe("grad reduce (1.60×)");
    expect(slowFacts(slowdowns({ launchRatio: null }))).toContainEqual(["Launch delays make steps", "–"]);
  });
});

describe("suspects", () => {
  it("cost the seconds lost times ranks", () => {
    expect(gpuHours(verdict(), 72)).toBeCloseTo((5 * 72) / 3600);
    expect(gpuHours(verdict({ effect: { secondsPerStep: 0.5, slowdown: 2 } }), 72)).toBe(0);
    const counted = { secondsPerStep: 0.5, slowdown: 2, secondsLost: 5, gpuHours: 0.25 };
    expect(gpuHours(verdict({ effect: counted }), 72)).toBe(0.25);
    expect([0, 0.004, 1.234, 1234].map(gpuHoursText)).toEqual(["–", "< 0.01", "1.23", "1,234"]);
    const [row] = suspectRows([verdict()], 72);
    expect(row?.cells.slice(0, 6)).toEqual([
      "Rank 2",
      "slow compute",
      "confirmed",
      "97 %",
      "+500 ms",
      "0.10",
    ]);
    expect(row?.step).toBe(12);
    const [priced] = suspectRows([verdict()], 72, 2.5);
    expect(priced?.cells[suspectColumns(2.5).indexOf("Cost")]).toBe("0.25");
  });
});

const blame = (change: Partial<Blame> = {}): Blame => ({
  attempt: 0,
  step: 7,
  peers: "work",
  recordedSeconds: 0.3,
  idealSeconds: 0.1,
  blamedSeconds: 0.198,
  blamed: [
    { ranks: [1, 0], cause: "link", seconds: 0.19 },
    { ranks: [1], cause: "host", seconds: 0.001 },
  ],
  victims: [{ rank: 1, waitedFor: 0, seconds: 0.15, distance: 1 }],
  path: [0],
  pathRanks: [0],
  culpritSpans: [0],
  victimSpans: [],
  ...change,
});

describe("blame", () => {
  it("names a link by its ends, and nothing below one per cent", () => {
    expect(blamedRows(blame())).toEqual([
      { name: "Link 1 → 0", cause: "delivery", text: "190 ms", fraction: expect.closeTo(0.95), rank: 0 },
    ]);
    expect(victimText({ rank: 1, waitedFor: 0, seconds: 0.15, distance: 1 })).toBe(
      "Rank 1 waited 150 ms for rank 0",
    );
  });

  it("says how much of the lost time is explained, and that a usual step lost nothing", () => {
    expect(blameSentence(blame())).toContain("of which 200 ms beyond the usual; the causes add up to 198 ms");
    const usual = blame({ recordedSeconds: 0.1005 });
    expect(isSlow(usual)).toBe(false);
    expect(blameSentence(usual)).toContain("as long as usual");
  });

  it("shows only lanes of ranks that it is about", () => {
    const timeline = timelineOf([
      [0, 3, 0, 0, 10],
      [1, 3, 0, 0, 10],
      [5, 3, 0, 0, 10],
    ]);
    const model = modelOf(blame(), timeline);
    expect(model.lanes.map(({ rank }) => rank)).toEqual([0, 1]);
    expect(model.laneOf.get(1)).toBe(1);
  });
});

describe("two windows", () => {
  it("are compared by step and by the cells that changed most", () => {
    const before = slowdowns({
      recordedSeconds: [0.1],
      slowdown: 1,
      cells: [cell(0, 0, 1), cell(1, 0, 1)],
      steps: [1],
    });
    const after = slowdowns({ cells: [cell(0, 0, 1.01), cell(1, 0, 1.9), cell(1, 1, null)] });
    const rows = comparedRows(before, after, []);
    expect(rows[0]).toEqual(["Step", "100 ms", "200 ms", "+100 %"]);
    expect(rows[3]).toEqual(["stage 1, data 0", "1.00×", "1.90×", "+90 %"]);
    expect(rows.at(-1)).toEqual(["stage 1, data 1", "–", "–", "–"]);
    expect(rangeText(after)).toBe("steps 7 to 8");
  });

  it("begin with the steps before the first finding", () => {
    expect(usualBefore(slowdowns(), [verdict({ since: { attempt: 0, step: 40, time: 0 } })])).toEqual({
      from: 24,
      to: 39,
    });
    expect(usualBefore(slowdowns(), [])).toEqual({ from: 0, to: 6 });
    const ofBefore = verdict({ since: { attempt: 0, step: 3, time: 0 } });
    const since = verdict({ since: { attempt: 1, step: 40, time: 0 } });
    expect(usualBefore(slowdowns({ attempt: 1 }), [ofBefore, since])).toEqual({ from: 24, to: 39 });
    expect(usualBefore(slowdowns({ attempt: 1 }), [ofBefore])).toEqual({ from: 0, to: 6 });
  });
});

describe("links", () => {
  const link = {
    source: 1,
    destination: 0,
    messages: 8,
    seconds: 0.02,
    usualSeconds: 0.001,
    crossesNodes: true,
    slowdown: 1.25,
  };
  it("are a matrix of the ranks that have any, up to a limit", () => {
    expect(linkGrid([link])?.values).toEqual([
      [null, null],
      [0.02, null],
    ]);
    expect(linkGrid(Array.from({ length: 80 }, (_, at) => ({ ...link, source: at + 1 })))).toBeNull();
    expect(linkCells(link)).toEqual(["1 → 0", "1.25×", "20.0 ms", "+19.0 ms", "8", "nodes"]);
  });
});

describe("the tracer", () => {
  it("says what is lost and how certain clocks are", () => {
    const worker = { worker: 1, node: "n", ranks: 2, connected: true, lost: 3, clockSeconds: null };
    const facts = Object.fromEntries(
      tracerFacts(
        {
          workers: [worker],
          missingRanks: [4],
          overhead: 0.0004,
          records: 123456,
          storedSteps: 20,
          storedBytes: 1,
          lagSeconds: 0.3,
          skippedSteps: 0,
          detectorFailures: 0,
        },
        undefined,
      ),
    );
    expect(facts["Records lost"]).toBe("3");
    expect(facts["Ranks without records"]).toBe("rank 4");
    expect(facts["Cost of recording"]).toBe("0.040 % of a step");
    expect(facts["Steps not judged"]).toBe("none");
    expect(workerCells(worker).at(-1)).toBe("unknown");
  });
});
