/** The logit lens of the positions around the selected token: the model reads the text once more for each request. */
import { computed, onBeforeUnmount, shallowRef, ref, watch } from "vue";
import { asApiError, isAbort, type ApiError } from "../../../api/client";
import type { Lens } from "../../../scope/client";
import { isActive } from "../../../scope/protocol";
import { useScope } from "../useScope";
import { lastRead, useScopeSelection } from "../useScopeSelection";
import { windowOf } from "./lensViews";

/** Number of likeliest tokens of each cell. */
const TOP = 10;

/** Positions [first, end) of a text. */
export interface LensPlace {
  readonly run: string;
  readonly sample: number;
  readonly first: number;
  readonly end: number;
  /** A token to follow through the layers; null: none. */
  readonly token: number | null;
}

export function useLens() {
  const { client, run, runId, hello, version } = useScope();
  const { sample, sampleIndex, length, readToken } = useScopeSelection();
  const lens = shallowRef<Lens | null>(null);
  const problem = shallowRef<ApiError | null>(null);
  const followed = ref<number | null>(null);
  const tries = ref(0);
  let pending: AbortController | undefined;
  let shownRun: string | null = null;

  const state = computed(() => (version.value >= 0 ? run.value?.header.state : undefined));
  /** Positions that can be read: while the run continues those of the prompt, so that each is read once. */
  const count = computed(() => {
    if (state.value === undefined || state.value === "queued" || state.value === "prefill") return 0;
    const prompt = sample.value?.promptLength ?? 0;
    return isActive(state.value) ? Math.min(prompt, length.value) : lastRead(length.value, prompt);
  });
  const place = computed<LensPlace | null>(() => {
    if (runId.value === null || count.value === 0) return null;
    const { first, end } = windowOf(readToken.value, count.value, hello.value?.model.layers ?? 1, TOP);
    const [name, index] = [runId.value, sampleIndex.value];
    return { run: name, sample: index, first, end, token: followed.value };
  });
  async function request(at: LensPlace): Promise<void> {
    const { signal } = (pending = new AbortController());
    try {
      const { run: name, sample: index, first, end, token } = at;
      const query = { sample: index, positions: `${first}-${end - 1}`, top: TOP, token };
      const found = await client.analysis("lens", name, query, signal);
      if (!signal.aborted) [lens.value, problem.value] = [found, null];
    } catch (error) {
      if (!isAbort(error)) [lens.value, problem.value] = [null, asApiError(error)];
    }
  }
  /** What is shown is of another text or of other positions. */
  const isOther = (at: LensPlace | null): boolean =>
    at === null ||
    at.run !== shownRun ||
    lens.value?.sample !== at.sample ||
    lens.value.positions[0] !== at.first;
  watch(
    () => JSON.stringify([place.value, tries.value]),
    () => {
      pending?.abort();
      const at = place.value;
      if (isOther(at)) [lens.value, problem.value] = [null, null];
      shownRun = at?.run ?? null;
      if (at) void request(at);
    },
    { immediate: true },
  );
  onBeforeUnmount(() => pending?.abort());
  return { lens, problem, place, followed, retry: () => (tries.value += 1) };
}
