/** The timeline of the selected step, or of the newest one while nothing is selected; newest answers are cached. */
import { onBeforeUnmount, shallowRef, watch, type ShallowRef } from "vue";
import { asApiError, isAbort, type ApiClient, type ApiError, type Query } from "../../../api/client";
import { buildTimeline, type TimelineModel } from "../../../trace/timeline";

/** While following the newest step, a timeline is fetched at most this often. */
const FOLLOW_MS = 1000;
const CACHED = 24;

export type TimelineState =
  | { readonly kind: "empty" }
  /** `before` is the picture of another step, shown faded until the new one is here. */
  | { readonly kind: "loading"; readonly step: number; readonly before: TimelineModel | null }
  | { readonly kind: "ready"; readonly step: number; readonly model: TimelineModel }
  | { readonly kind: "error"; readonly step: number; readonly error: ApiError };

export interface TimelineTarget {
  readonly step: number | null;
  /** Steps repeat after a resume: the attempt distinguishes cached timelines of the same step. */
  readonly attempt: number;
  /** Following: the step changes by itself, and the old picture stays until the new one is here. */
  readonly follows: boolean;
}

/** `bounds`: which part of a large step is fetched first. */
export function useTimeline(
  client: ApiClient,
  target: () => TimelineTarget,
  bounds: () => Query,
): ShallowRef<TimelineState> {
  const state = shallowRef<TimelineState>({ kind: "empty" });
  const cached = new Map<string, TimelineModel>();
  let pending: AbortController | undefined;
  let timer: ReturnType<typeof setTimeout> | undefined;
  let lastFetch = 0;

  async function fetchStep(step: number): Promise<void> {
    pending?.abort();
    const { signal } = (pending = new AbortController());
    lastFetch = Date.now();
    try {
      const source = await client.timeline(step, signal, bounds());
      const model = buildTimeline(source);
      if (source.complete) keep(`${source.attempt}:${step}`, model);
      state.value = { kind: "ready", step, model };
    } catch (error) {
      if (!isAbort(error)) state.value = { kind: "error", step, error: asApiError(error) };
    }
  }

  function keep(key: string, model: TimelineModel): void {
    cached.set(key, model);
    const [oldest] = cached.keys();
    if (cached.size > CACHED && oldest !== undefined) cached.delete(oldest);
  }

  function go({ step, attempt, follows }: TimelineTarget): void {
    clearTimeout(timer);
    if (step === null) {
      state.value = { kind: "empty" };
      return;
    }
    const known = cached.get(`${attempt}:${step}`);
    if (known) {
      pending?.abort();
      state.value = { kind: "ready", step, model: known };
      return;
    }
    const keepsPicture = follows && state.value.kind === "ready";
    if (!keepsPicture) state.value = { kind: "loading", step, before: pictureOf(state.value) };
    const wait = follows ? Math.max(0, lastFetch + FOLLOW_MS - Date.now()) : 0;
    if (wait > 0) timer = setTimeout(() => void fetchStep(target().step ?? step), wait);
    else void fetchStep(step);
  }

  watch(
    () => [target().step, target().attempt, target().follows] as const,
    () => go(target()),
    { immediate: true },
  );
  onBeforeUnmount(() => {
    clearTimeout(timer);
    pending?.abort();
  });
  return state;
}

/** What can be drawn in a state. */
export function pictureOf(state: TimelineState): TimelineModel | null {
  if (state.kind === "ready") return state.model;
  return state.kind === "loading" ? state.before : null;
}
