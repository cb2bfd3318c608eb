import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { describe, expect, it } from "vitest";
import type { RankView, Timeline } from "../api/types";
import { peerSpans, spanTitle } from "./describe";
import { Flag, GROUPS, Kind, kindStyle } from "./kinds";
import { buildTimeline, neighbour, otherEnd, pick, spanAt, trackOf } from "./timeline";

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

describe("kinds", () => {
  it("are numbered as in Python", () => {
    const source = readFileSync(
      resolve(import.meta.dirname, "../../../common/src/megatronapp_common/trace.py"),
      "utf8",
    );
    const enumOf = (name: string): Record<string, number> => {
      const body = source.split(`class ${name}(`)[1]?.split("\nclass ")[0] ?? "";
      return Object.fromEntries(
        [...body.matchAll(/^ {4}([A-Z_]+) = (\d+)$/gm)].map(([, key, value]) => [key, Number(value)]),
      );
    };
    expect(enumOf("RecordKind")).toEqual(Kind);
    expect(enumOf("Flag")).toEqual(Flag);
  });

  it("all have a name and a colour, known or not", () => {
    for (const kind of [...Object.values(Kind).filter((number) => number < 32), 99]) {
      const { label, group } = kindStyle(kind);
      expect(label).not.toBe("");
      expect(GROUPS[group].colour.dark).toMatch(/^#/);
    }
    expect(kindStyle(99).label).toBe("Kind 99");
  });
});

describe("timeline", () => {
  it("has a lane per rank and covers its spans, samples left out", () => {
    expect(model.lanes.map((lane) => lane.rank)).toEqual([0, 1]);
    expect([model.fromNs, model.toNs]).toEqual([0, 101]);
    expect(model.lanes[0]?.main).toEqual([1, 2, 3]);
    expect(model.lanes[0]?.all[0]).toBe(0);
    expect(trackOf(Kind.FAULT)).toBe("fault");
  });

  it("survives a step without spans", () => {
    const empty = buildTimeline(timelineOf([]));
    expect(empty.lanes).toEqual([]);
    expect(pick(empty, 0, 5, 1)).toBeUndefined();
  });

  it("finds the span under the pointer, or one close by", () => {
    expect(pick(model, 0, 15, 0)).toBe(1);
    expect(pick(model, 0, 33, 3)).toBe(2);
    expect(pick(model, 0, 45, 3)).toBeUndefined();
    expect(pick(model, 5, 15, 3)).toBeUndefined();
  });

  it("moves by keys along and across lanes", () => {
    expect(neighbour(model, null, 1, "next")).toBe(5);
    expect(neighbour(model, 1, 0, "next")).toBe(2);
    expect(neighbour(model, 1, 0, "previous")).toBe(1);
    expect(neighbour(model, 3, 0, "down")).toBe(6);
    expect(neighbour(model, 6, 1, "up")).toBe(3);
    expect(neighbour(model, 6, 1, "down")).toBe(6);
    expect(neighbour(model, 3, 0, "first")).toBe(1);
    expect(neighbour(model, 5, 1, "last")).toBe(6);
  });

  it("knows the other end of a transfer", () => {
    expect(otherEnd(model, 2)).toBe(5);
    expect(otherEnd(model, 5)).toBe(2);
    expect(otherEnd(model, 1)).toBeUndefined();
  });
});

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
