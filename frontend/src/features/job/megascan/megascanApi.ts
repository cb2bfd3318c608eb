/** What the hub answers about slow ranks, with the requests for it: only this screen needs them. */
import { asApiError, type ApiClient } from "../../../api/client";
import type { Schemas, Timeline } from "../../../api/types";
import { buildTimeline, type TimelineModel } from "../../../trace/timeline";
import { WHOLE_UP_TO } from "../timeline/spanWindows";

export type Slowdowns = Schemas["SlowdownsView"];
export type SlowCell = Schemas["SlowCell"];
export type SlowLink = Schemas["SlowLink"];
export type Blame = Schemas["BlameView"];
export type Blamed = Schemas["BlamedView"];
export type Victim = Schemas["VictimView"];
export type Tracer = Schemas["TracerView"];
export type TraceWindow = Schemas["Window"];
export type Peers = Slowdowns["peers"];

export interface StepRange {
  readonly from: number;
  readonly to: number;
}

async function get<T>(
  client: ApiClient,
  path: string,
  query: Record<string, string | number | null>,
  signal: AbortSignal,
): Promise<T> {
  const given = Object.entries(query).flatMap(([name, value]) =>
    value === null ? [] : [[name, String(value)]],
  );
  const response = await client.send(`${client.root}${path}?${new URLSearchParams(given).toString()}`, {
    signal,
  });
  try {
    return (await response.json()) as T;
  } catch (error) {
    throw asApiError(error);
  }
}

/** Slowdowns of the newest whole steps, or of those of a range; peers null: as the hub chooses. */
export const fetchSlowdowns = (
  client: ApiClient,
  peers: Peers | null,
  range: StepRange | null,
  signal: AbortSignal,
): Promise<Slowdowns> =>
  get(client, "slowdowns", { peers, from: range?.from ?? null, to: range?.to ?? null }, signal);

export const fetchTracer = (client: ApiClient, signal: AbortSignal): Promise<Tracer> =>
  get(client, "tracer", {}, signal);

/** Windows of detailed spans that are not over. */
export const fetchWindows = (client: ApiClient, signal: AbortSignal): Promise<TraceWindow[]> =>
  get(client, "trace/windows", {}, signal);

export const cancelWindow = async (client: ApiClient, id: string): Promise<void> => {
  await client.send(`${client.root}trace/windows/${encodeURIComponent(id)}`, { method: "DELETE" });
};

export interface BlamedStep {
  readonly blame: Blame;
  readonly model: TimelineModel;
}

/** Lanes of a blamed step at most: those of its path and its victims. */
export const MOST_LANES = 24;
/** Width for which a large step is fetched before that of the picture is known. */
const FIRST_PIXELS = 2048;

/** The blame of a step (null: the newest, and of the newest attempt), with its spans on the ranks that it is about. */
export async function fetchBlame(
  client: ApiClient,
  target: { readonly step: number | null; readonly attempt: number | null },
  signal: AbortSignal,
): Promise<BlamedStep> {
  const blame = await get<Blame>(client, "blame", { ...target }, signal);
  const timeline = await client.timeline(blame.step, signal, {
    attempt: blame.attempt,
    pixels: FIRST_PIXELS,
    rank: ranksOf(blame),
    wholeUpTo: WHOLE_UP_TO,
  });
  return { blame, model: modelOf(blame, timeline) };
}

/** Ranks that the picture of a blame has lanes for: the culprit, those on the path, and the nearest victims. */
export function ranksOf({ blamed, pathRanks, victims }: Blame): number[] {
  const about = new Set([...(blamed[0]?.ranks ?? []), ...pathRanks, ...victims.map(({ rank }) => rank)]);
  return [...about].slice(0, MOST_LANES);
}

/** The timeline with the lanes of these ranks alone. */
export function modelOf(blame: Blame, timeline: Timeline): TimelineModel {
  const model = buildTimeline(timeline);
  const shown = new Set(ranksOf(blame));
  const lanes = model.lanes.filter(({ rank }) => shown.has(rank));
  const window = model.window && { ...model.window, firstTrack: 0, tracks: lanes.length };
  return { ...model, window, lanes, laneOf: new Map(lanes.map(({ rank }, lane) => [rank, lane])) };
}
