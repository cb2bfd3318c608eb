/** A step of two ranks for tests of the timeline: records [rank, kind, microbatch, start, duration] in ns. */
import type { Timeline } from "../api/types";
import { Flag, Kind } from "./kinds";

export type Row = readonly [
  rank: number,
  kind: number,
  microbatch: number | null,
  start: number,
  duration: number,
];

export function timelineOf(rows: readonly Row[], flows: [number, number][] = []): Timeline {
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

export const rows: readonly Row[] = [
  [0, Kind.STEP, null, 0, 100],
  [0, Kind.FORWARD, 0, 10, 20],
  [0, Kind.SEND_POST, 0, 30, 2],
  [0, Kind.BACKWARD, 0, 60, 30],
  [1, Kind.STEP, null, 2, 99],
  [1, Kind.RECV_WAIT, 0, 5, 30],
  [1, Kind.FORWARD, 0, 35, 60],
  [1, Kind.METRIC, null, 500, 0],
];
