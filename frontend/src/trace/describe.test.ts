import { describe, expect, it } from "vitest";
import type { RankView } from "../api/types";
import { peerSpans, spanTitle } from "./describe";
import { buildTimeline, spanAt } from "./timeline";
import { rows, timelineOf } from "./testTimeline";

const model = buildTimeline(timelineOf(rows, [[2, 5]]));

describe("words", () => {
  const rank = (number: number, pp: number): RankView => ({ rank: number, pp }) as RankView;

  it("name a span", () => {
    const span = spanAt(model.source, 1);
    expect(span && spanTitle(span)).toBe("Forward, microbatch 0");
    expect(span?.injected).toBe(true);
    expect(spanAt(model.source, 99)).toBeUndefined();
  });

  it("compare a span with the same work on its stage only", () => {
    const span = spanAt(model.source, 6);
    if (!span) throw new Error("no such span");
    expect(
      peerSpans(model, span, [rank(0, 0), rank(1, 0)]).map((peer) => [peer.rank, peer.durationNs]),
    ).toEqual([
      [0, 20],
      [1, 60],
    ]);
    expect(peerSpans(model, span, [rank(0, 0), rank(1, 1)])).toHaveLength(1);
  });
});
