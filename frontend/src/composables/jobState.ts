/** The job's state as refs, and how history and frames change it. */
import { ref, shallowRef, triggerRef } from "vue";
import type { ApiClient, ApiError } from "../api/client";
import { METRICS, type JobView, type Verdict } from "../api/types";
import { SeriesStore } from "../store/seriesStore";
import { StepStore, type StepsHeader } from "../store/stepStore";
import { float32Body, FrameType, type Frame } from "../wire/frames";
import type { LiveState } from "../wire/live";

/** Cells of history to request per metric: ranks times steps. */
const HISTORY_CELLS = 200_000;
const HISTORY_STEPS = 4000;
const LEAST_STEPS = 20;
const CURVES = ["loss"] as const;

export type LoadState =
  | { readonly kind: "loading" }
  | { readonly kind: "ready" }
  | { readonly kind: "error"; readonly error: ApiError };

interface SeriesPoints {
  readonly attempts: number[];
  readonly steps: number[];
  readonly values: (number | null)[];
}

export function createJobState() {
  return {
    job: shallowRef<JobView | null>(null),
    verdicts: shallowRef<readonly Verdict[]>([]),
    load: shallowRef<LoadState>({ kind: "loading" }),
    live: shallowRef<LiveState>({ kind: "connecting" }),
    /** Why the caller cannot change the job; undefined: they can, or it is not known yet. */
    viewOnly: ref<string>(),
    /** A message for the user that belongs to no panel. */
    notice: ref<string | null>(null),
    steps: shallowRef(new StepStore()),
    series: shallowRef(new SeriesStore()),
  };
}

export type JobState = ReturnType<typeof createJobState>;

/** Steps to request: as many as the page can hold and the hub can send at once. */
export function historyRange(job: JobView): { readonly from: number } {
  const newest = job.ranks.reduce((step, rank) => Math.max(step, rank.step ?? 0), 0);
  const columns = Math.floor(HISTORY_CELLS / Math.max(job.ranks.length, 1));
  return { from: Math.max(0, newest - Math.min(HISTORY_STEPS, Math.max(LEAST_STEPS, columns))) };
}

/** The job and its verdicts. Live frames that arrive meanwhile are newer. */
export async function loadJob(client: ApiClient, state: JobState, signal: AbortSignal): Promise<JobView> {
  const [oldJob, oldVerdicts] = [state.job.value, state.verdicts.value];
  const [job, verdicts] = await Promise.all([client.job(signal), client.verdicts(signal)]);
  if (state.job.value === oldJob) state.job.value = job;
  if (state.verdicts.value === oldVerdicts) state.verdicts.value = verdicts;
  return job;
}

/** Steps and curves before the live frames begin. */
export async function loadSteps(
  client: ApiClient,
  state: JobState,
  job: JobView,
  signal: AbortSignal,
): Promise<void> {
  const range = historyRange(job);
  const [views, parts, curves] = await Promise.all([
    client.steps(range, signal),
    Promise.all(METRICS.map((metric) => client.heatmap(metric, range, signal))),
    Promise.all(CURVES.map((name) => client.series(name, range, signal))),
  ]);
  state.steps.value.addSteps(views);
  for (const part of parts) state.steps.value.addHeatmap(part);
  for (const curve of curves) state.series.value.add(curve.name, curve);
  triggerRef(state.steps);
  triggerRef(state.series);
}

/** Takes one live frame; unknown types are skipped. */
export function takeFrame(state: JobState, frame: Frame): void {
  const { header } = frame;
  switch (frame.type) {
    case FrameType.SNAPSHOT:
      state.job.value = header as unknown as JobView;
      break;
    case FrameType.STEPS:
      state.steps.value.addFrame(header as unknown as StepsHeader, float32Body(frame));
      triggerRef(state.steps);
      break;
    case FrameType.METRICS:
      takeMetrics(state, header["series"] as Record<string, SeriesPoints>);
      break;
    case FrameType.VERDICTS:
      state.verdicts.value = header["verdicts"] as Verdict[];
      break;
    case FrameType.ERROR:
      state.notice.value = `${String(header["message"])} ${String(header["hint"] ?? "")}`;
      break;
  }
}

function takeMetrics(state: JobState, series: Record<string, SeriesPoints>): void {
  for (const [name, points] of Object.entries(series)) state.series.value.add(name, points);
  triggerRef(state.series);
}
