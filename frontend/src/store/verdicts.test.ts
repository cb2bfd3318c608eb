import { describe, expect, it } from "vitest";
import type { Verdict } from "../api/types";
import {
  activeVerdicts,
  causeName,
  costFigures,
  costOf,
  stateName,
  subjectName,
  suspectRanks,
} from "./verdicts";

const verdict = (change: Partial<Verdict>): Verdict => ({
  id: "a",
  subject: { type: "rank", ranks: [2], worker: 1, node: "node-1" },
  cause: "compute",
  state: "confirmed",
  stale: false,
  effect: { secondsPerStep: 0.1, secondsLost: 0.7, slowdown: 3 },
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
    const group = verdict({
      subject: { type: "group", ranks: [0, 1], worker: 0, node: "a" },
      cause: "nvlink-pcie",
    });
    expect(`${subjectName(group)}: ${causeName(group)}`).toBe("Links of ranks 0 and 1: slow NVLink or PCIe");
  });

  it("name the reason of a cause where it is known", () => {
    expect(causeName(verdict({ reason: "down-clock" }))).toBe("slow compute (down clock)");
    expect(causeName(verdict({ cause: "host", reason: "cpu-contention" }))).toBe(
      "host stalls (CPU contention)",
    );
    expect(causeName(verdict({ cause: "host", reason: null }))).toBe("host stalls");
  });

  it("mark no rank while it is unknown whether they hold", () => {
    const unknown = verdict({ stale: true });
    expect([...suspectRanks([unknown])]).toEqual([]);
    expect(stateName(unknown)).toContain("unknown");
    expect(stateName(verdict({}))).toBe("confirmed");
  });

  it("cost what they cost up to now, or up to their end", () => {
    expect(costOf(verdict({}), 49, 0.3)).toEqual({
      perStepS: 0.1,
      longer: expect.closeTo(0.5),
      stepsSoFar: 10,
      totalS: 0.7,
    });
    const over = verdict({ until: { attempt: 0, step: 44, time: 0 } });
    expect(costOf(over, 900, undefined)).toMatchObject({ stepsSoFar: 5, longer: undefined });
    expect(
      costFigures(verdict({}), costOf(verdict({}), 40, 0.3)).map(({ value, name }) => `${value} ${name}`),
    ).toEqual(["3.00× as long as expected", "+100 ms on every step (+50 %)", "700 ms lost in 1 step"]);
    const hung = verdict({ cause: "hang", effect: { secondsPerStep: 75, slowdown: 1 } });
    expect(costFigures(hung, costOf(hung, 49, 0.3))).toEqual([
      { value: "1 min 15 s", name: "without progress" },
    ]);
  });
});
