import { describe, expect, it } from "vitest";
import type { RankView, Timeline } from "../api/types";
import { peerSpans, spanTitle } from "./describe";
import { Flag, Kind } from "./kinds";
import { buildTimeline, spanAt } from "./timeline";

type Row = readonly [rank: number, kind: number, microbatch: number | null, start: number, duration: number];

function timelineOf(rows: readonly Row[], flows: [number, number][] = []): Timeline {
  return {
    attempt: 0,
    step: 7,
    originNs: 0,
    complete: true,
    ranks: [...new Set(rows.map(([rank]) => rank))],
    kindNames: {},
    rank: rows.map(([rank]) => rank),
    kind: rows.map(([, kind]) => kind),
    chunk: rows.map(() => 0),
    microbatch: rows.map(([, , microbatch]) => microbatch),
    startNs: rows.map(([, , , start]) => start),
    durationNs: rows.map(([, , , , duration]) => duration),
    flags: rows.map(([, kind]) => (kind === Kind.FORWARD ? Flag.INJECTED : 0)),
    runQueueNs: rows.map(() => 5),
    bytes: rows.map(() => null),
    peer: rows.map(() => null),
    flows,
  };
}

const rows: readonly Row[] = [
  [0, Kind.STEP, null, 0, 100],
  [0, Kind.FORWARD, 0, 10, 20],
  [0, Kind.SEND_POST, 0, 30, 2],
  [0, Kind.BACKWARD, 0, 60, 30],
  [1, Kind.STEP, null, 2, 99],
  [1, Kind.RECV_WAIT, 0, 5, 30],
  [1, Kind.FORWARD, 0, 35, 60],
  [1, Kind.METRIC, null, 500, 0],
];

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
