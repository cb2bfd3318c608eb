/** One step of all ranks, laid out as lanes: what to draw where, which span is under the pointer, which follows. Pure. */
import type { Timeline, TimelineWindow } from "../api/types";
import { crossingOf, Flag, isEarly, Kind, roleNamed, type Crossing, type Role } from "./kinds";

/** Where in a lane a span is drawn. */
export type Track = "frame" | "main" | "layer" | "copy" | "fault";

/** One span of a timeline, read from its columns. */
export interface SpanView {
  readonly index: number;
  readonly rank: number;
  readonly kind: number;
  readonly chunk: number;
  readonly microbatch: number | null;
  readonly startNs: number;
  readonly endNs: number;
  readonly durationNs: number;
  readonly runQueueNs: number | null;
  readonly bytes: number | null;
  readonly peer: number | null;
  /** A message between forward and backward ranks. */
  readonly crossing: Crossing | null;
  readonly injected: boolean;
  /** A pass that ran before its turn in the plan. */
  readonly early: boolean;
  readonly saturated: boolean;
  readonly deviceClock: boolean;
}

export interface Lane {
  readonly rank: number;
  /** With MegaFBD. */
  readonly role: Role | null;
  /** Indices of spans on the main track, by start. */
  readonly main: readonly number[];
  /** All indices of this rank, outermost first. */
  readonly all: readonly number[];
}

export interface TimelineModel {
  readonly source: Timeline;
  readonly lanes: readonly Lane[];
  readonly laneOf: ReadonlyMap<number, number>;
  readonly fromNs: number;
  readonly toNs: number;
  readonly flowsOf: ReadonlyMap<number, readonly (readonly [number, number])[]>;
  /** The part of the step that is here; null: all of it. */
  readonly window: TimelineWindow | null;
}

/** Place of a span in the whole step, by its place in this part: what addresses and the blame of a step refer to. */
export const placeOf = ({ window }: TimelineModel, index: number): number => window?.place[index] ?? index;

/** Where a span of the whole step is in this part; null where it is not. */
export function indexOf({ source, window }: TimelineModel, place: number): number | null {
  if (!window) return place < source.rank.length ? place : null;
  let [low, high] = [0, window.place.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((window.place[middle] ?? 0) < place) low = middle + 1;
    else high = middle;
  }
  return window.place[low] === place ? low : null;
}

/** Spans that were merged into one because each is shorter than a pixel; 1 for a span that is alone. */
export const mergedInto = ({ window }: TimelineModel, index: number): number => window?.merged[index] ?? 1;

/** Role of a rank with MegaFBD; null without it. */
export function roleOf(source: Timeline, rank: number | null): Role | null {
  return rank === null ? null : roleNamed(source.roles?.[rank]);
}

export function spanAt(source: Timeline, index: number): SpanView | undefined {
  const [startNs, durationNs] = [source.startNs[index], source.durationNs[index]];
  if (startNs === undefined || durationNs === undefined) return undefined;
  const flags = source.flags[index] ?? 0;
  const [rank, kind, peer] = [source.rank[index] ?? 0, source.kind[index] ?? 0, source.peer[index] ?? null];
  return {
    index,
    rank,
    kind,
    chunk: source.chunk[index] ?? 0,
    microbatch: source.microbatch[index] ?? null,
    startNs,
    endNs: startNs + durationNs,
    durationNs,
    runQueueNs: source.runQueueNs[index] ?? null,
    bytes: source.bytes[index] ?? null,
    peer,
    crossing: peer === null ? null : crossingOf(kind, roleOf(source, rank), roleOf(source, peer)),
    early: isEarly(kind, flags),
    injected: (flags & Flag.INJECTED) !== 0,
    saturated: (flags & Flag.SATURATED) !== 0,
    deviceClock: (flags & Flag.DEVICE_CLOCK) !== 0,
  };
}

export function trackOf(kind: number): Track {
  if (kind === Kind.STEP) return "frame";
  if (kind === Kind.LAYER_FORWARD || kind === Kind.LAYER_BACKWARD) return "layer";
  if (kind === Kind.COPY || kind === Kind.NCCL) return "copy";
  return kind === Kind.FAULT || kind === Kind.STOPPED ? "fault" : "main";
}

const drawable = (kind: number): boolean => kind !== Kind.METRIC && kind !== Kind.COUNTER;

const NONE: readonly number[] = [];

/** Lanes of `source`, one per rank of the step, forward ranks first, and the range of time that its spans cover. */
export function buildTimeline(source: Timeline): TimelineModel {
  const byRank = new Map<number, number[]>(source.ranks.map((rank) => [rank, []]));
  const window = source.window ?? null;
  let [fromNs, toNs] = [Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY];
  source.rank.forEach((rank, index) => {
    const start = source.startNs[index] ?? 0;
    if (!drawable(source.kind[index] ?? 0)) return;
    fromNs = Math.min(fromNs, start);
    toNs = Math.max(toNs, start + (source.durationNs[index] ?? 0));
    const list = byRank.get(rank);
    if (list) list.push(index);
    else byRank.set(rank, [index]);
  });
  const group = (rank: number): number => (roleOf(source, rank) === "backward" ? 1 : 0);
  const ranks =
    window?.rankRuns.flatMap(([first, count]) => Array.from({ length: count }, (_, at) => first + at)) ??
    [...byRank.keys()].sort((left, right) => group(left) - group(right) || left - right);
  if (window) [fromNs, toNs] = [window.stepFromNs, window.stepToNs];
  return {
    source,
    lanes: ranks.map((rank) => laneOf(source, rank, byRank.get(rank) ?? NONE)),
    laneOf: new Map(ranks.map((rank, lane) => [rank, lane])),
    fromNs: Number.isFinite(fromNs) ? fromNs : 0,
    toNs: Number.isFinite(toNs) ? toNs : 1,
    flowsOf: flowIndex(source),
    window,
  };
}

function laneOf(source: Timeline, rank: number, indices: readonly number[]): Lane {
  if (indices.length === 0) return { rank, role: roleOf(source, rank), all: NONE, main: NONE };
  const start = (index: number): number => source.startNs[index] ?? 0;
  const size = (index: number): number => source.durationNs[index] ?? 0;
  const all = [...indices].sort((left, right) => start(left) - start(right) || size(right) - size(left));
  return {
    rank,
    role: roleOf(source, rank),
    all,
    main: all.filter((index) => trackOf(source.kind[index] ?? 0) === "main"),
  };
}

function flowIndex(source: Timeline): Map<number, (readonly [number, number])[]> {
  const flows = new Map<number, (readonly [number, number])[]>();
  for (const [send, receive] of source.flows) {
    for (const end of [send, receive]) flows.set(end, [...(flows.get(end) ?? []), [send, receive]]);
  }
  return flows;
}

/** The other end of a transfer span, or undefined. */
export function otherEnd(model: TimelineModel, index: number): number | undefined {
  const [flow] = model.flowsOf.get(index) ?? [];
  return flow === undefined ? undefined : flow[0] === index ? flow[1] : flow[0];
}

/** The span of `lane` at `timeNs`, or the nearest within `slackNs`; the innermost wins. */
export function pick(
  model: TimelineModel,
  lane: number,
  timeNs: number,
  slackNs: number,
): number | undefined {
  let best: number | undefined;
  let bestScore = Number.POSITIVE_INFINITY;
  for (const index of model.lanes[lane]?.main ?? []) {
    const start = model.source.startNs[index] ?? 0;
    const size = model.source.durationNs[index] ?? 0;
    if (start - slackNs > timeNs) break;
    const outside = Math.max(start - timeNs, timeNs - (start + size), 0);
    if (outside > slackNs) continue;
    const score = outside * 1e6 + size;
    if (score <= bestScore) [best, bestScore] = [index, score];
  }
  return best;
}

export type Direction = "previous" | "next" | "up" | "down" | "first" | "last";

/** The span that a key leads to from `current`; the lane's first one where there is no current one. */
export function neighbour(
  model: TimelineModel,
  current: number | null,
  rank: number | null,
  to: Direction,
): number | undefined {
  const here = current === null ? undefined : spanAt(model.source, current);
  const lane = model.laneOf.get(here?.rank ?? rank ?? -1) ?? 0;
  const main = model.lanes[lane]?.main ?? [];
  return here ? MOVES[to](model, here, lane, main) : main[0];
}

type Move = (
  model: TimelineModel,
  here: SpanView,
  lane: number,
  main: readonly number[],
) => number | undefined;

const along = (main: readonly number[], here: SpanView, by: number): number | undefined =>
  main[Math.min(Math.max(main.indexOf(here.index) + by, 0), main.length - 1)];

const MOVES: Readonly<Record<Direction, Move>> = {
  first: (_model, _here, _lane, main) => main[0],
  last: (_model, _here, _lane, main) => main.at(-1),
  previous: (_model, here, _lane, main) => along(main, here, -1),
  next: (_model, here, _lane, main) => along(main, here, 1),
  up: (model, here, lane) => vertical(model, here, lane - 1),
  down: (model, here, lane) => vertical(model, here, lane + 1),
};

function vertical(model: TimelineModel, here: SpanView, lane: number): number | undefined {
  const middle = (here.startNs + here.endNs) / 2;
  return pick(model, lane, middle, Number.MAX_SAFE_INTEGER) ?? here.index;
}
