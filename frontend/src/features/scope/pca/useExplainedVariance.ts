/** Share of the variance of the points that are shown along each principal component. */
import { computed, onBeforeUnmount, ref, watch, type Ref } from "vue";
import { asApiError, isAbort, type ApiError } from "../../../api/client";
import { explainedShares, type Point } from "../../../scope/views/pcaPoints";
import { isActive } from "../../../scope/protocol";
import { useScope } from "../useScope";

/** What the page knows of the total variance of a run at a layer. */
type Known = number | ApiError;

export function useExplainedVariance(points: Ref<readonly Point[]>, layer: Ref<number>) {
  const { run, runId, version, client } = useScope();
  const known = ref(new Map<string, Known>());
  const ended = computed(() => version.value >= 0 && run.value !== null && !isActive(run.value.header.state));
  const key = computed(() =>
    ended.value && points.value.length > 1 ? `${runId.value}/${layer.value}` : null,
  );
  let pending: AbortController | undefined;
  async function request(target: string): Promise<void> {
    const [id, at] = [runId.value, layer.value];
    if (id === null || typeof known.value.get(target) === "number") return;
    const { signal } = (pending = new AbortController());
    try {
      known.value.set(target, await client.variance(id, at, signal));
    } catch (error) {
      if (!isAbort(error)) known.value.set(target, asApiError(error));
    }
  }
  watch(
    key,
    (now) => {
      pending?.abort();
      if (now !== null) void request(now);
    },
    { immediate: true },
  );
  onBeforeUnmount(() => pending?.abort());
  const answer = computed(() => (key.value === null ? undefined : known.value.get(key.value)));
  const shares = computed(() =>
    typeof answer.value === "number" ? explainedShares(points.value, answer.value) : null,
  );
  /** Why there are no shares; null: there are. */
  const why = computed(() => {
    if (shares.value) return null;
    if (!ended.value) return "known once the run has ended";
    if (answer.value === undefined)
      return points.value.length > 1 ? "being computed" : "undefined for a single token";
    if (typeof answer.value === "number") return "the states do not differ";
    return answer.value.code === "not-recorded" ? "not recorded" : answer.value.message;
  });
  return { shares, why };
}
