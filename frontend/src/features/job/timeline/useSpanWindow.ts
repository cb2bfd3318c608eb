/** The part of a large step that a picture shows: what is loaded is drawn at once, and replaced when more is there. */
import { computed, onBeforeUnmount, shallowRef, watch, type ComputedRef, type ShallowRef } from "vue";
import { asApiError, isAbort, type ApiClient, type ApiError } from "../../../api/client";
import type { Timeline } from "../../../api/types";
import type { TimelineModel } from "../../../trace/timeline";
import { boundsAround, boundsOf, covers, type StepLimits, type View, type WindowBounds } from "./spanWindows";

export interface SpanWindow {
  readonly model: ComputedRef<TimelineModel | null>;
  /** Why what is shown could not be loaded; the picture stays. */
  readonly problem: ShallowRef<ApiError | null>;
  readonly look: (view: View) => void;
  readonly retry: () => void;
}

interface Options {
  /** The step as it was first loaded. */
  readonly base: () => TimelineModel | null;
  /** Place of the selected span in the whole step: it is loaded wherever it is. */
  readonly span: () => number | null;
  /** Lanes of these ranks only. */
  readonly ranks?: () => readonly number[];
  readonly build: (source: Timeline) => TimelineModel;
}

interface Request {
  readonly bounds: WindowBounds;
  readonly span: number | null;
}

const limitsOf = ({ fromNs, toNs, lanes }: TimelineModel): StepLimits => ({
  fromNs,
  toNs,
  lanes: lanes.length,
});

export function useSpanWindow(client: ApiClient, { base, span, ranks, build }: Options): SpanWindow {
  const part = shallowRef<{ readonly of: TimelineModel; readonly model: TimelineModel } | null>(null);
  const problem = shallowRef<ApiError | null>(null);
  let view: View | null = null;
  let loaded: Request | null = null;
  let pending: (Request & { readonly controller: AbortController }) | null = null;

  const model = computed(() => {
    const whole = base();
    return part.value?.of === whole ? part.value.model : whole;
  });
  const has = (request: Request | null, wanted: View, of: TimelineModel): boolean =>
    request !== null && request.span === span() && covers(request.bounds, wanted, limitsOf(of));

  function update(force = false): void {
    const of = base();
    if (!of?.window || !view) return;
    if (!force && (has(loaded, view, of) || has(pending, view, of))) return;
    pending?.controller.abort();
    void load(of, { bounds: boundsAround(view, limitsOf(of)), span: span() });
  }

  async function load(of: TimelineModel, request: Request): Promise<void> {
    const controller = new AbortController();
    const own = (pending = { ...request, controller });
    const { fromNs, toNs, pixels, firstTrack, tracks } = request.bounds;
    const lanes = ranks ? { rank: ranks() } : { firstTrack, tracks };
    const { step, attempt } = of.source;
    try {
      const bounds = { attempt, pixels, fromNs, toNs, ...lanes, span: request.span ?? undefined };
      const source = await client.timeline(step, controller.signal, bounds);
      if (base() !== of) return;
      loaded = request;
      problem.value = null;
      part.value = { of, model: build(source) };
    } catch (error) {
      if (!isAbort(error)) problem.value = asApiError(error);
    } finally {
      if (pending === own) pending = null;
    }
  }

  watch(
    base,
    (of) => {
      pending?.controller.abort();
      [pending, problem.value] = [null, null];
      loaded = of?.window ? { bounds: boundsOf(of.window), span: null } : null;
      update();
    },
    { immediate: true },
  );
  watch(span, () => update());
  onBeforeUnmount(() => pending?.controller.abort());
  return {
    model,
    problem,
    look: (now) => {
      view = now;
      update();
    },
    retry: () => update(true),
  };
}
