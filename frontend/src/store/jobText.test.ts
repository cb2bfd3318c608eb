import { describe, expect, it } from "vitest";
import { layoutText, tracerText } from "./jobText";

describe("job text", () => {
  const layout = { tensor: 1, pipeline: 2, virtualPipeline: 1, data: 2, context: 1, expert: 1 };

  it("names the axes that are in use", () => {
    expect(layoutText(layout)).toBe("PP2 × DP2");
    expect(layoutText({ ...layout, pipeline: 1, data: 1 })).toBe("one rank");
  });

  it("says whether the trace is whole", () => {
    const tracer = { state: "ok" as const, lost: 0, rings: 4, agents: 2, missingRanks: [], lagSeconds: 0.12 };
    expect(tracerText(tracer)).toMatchObject({ text: "complete", note: "120 ms behind", tone: "good" });
    expect(tracerText({ ...tracer, state: "lossy", lost: 1200 })).toMatchObject({
      text: "1,200 lost",
      tone: "warn",
    });
    expect(tracerText({ ...tracer, missingRanks: [2, 3] })).toMatchObject({
      text: "2 ranks missing",
      tone: "warn",
    });
    expect(tracerText({ ...tracer, state: "off" }).tone).toBe("off");
  });
});
