/** Scores of the prompt that is shown: the hub sends them to all pages once a page requests them. */
import { computed, onBeforeUnmount, ref, watch, type Ref } from "vue";
import { asApiError } from "../../api/client";
import { isCaptured } from "./emptyStates";
import type { RunHeader } from "../../scope/protocol";
import { useScope } from "./useScope";
import { useScopeSelection } from "./useScopeSelection";

/** Whether the run captures probabilities and has read its prompts. */
const hasScores = (header: RunHeader | undefined): boolean =>
  header !== undefined &&
  header.state !== "queued" &&
  header.state !== "prefill" &&
  isCaptured(header.capture, "probabilities");

/** Returns why they are missing; null: they are here or pending. */
export function useScores(): Readonly<Ref<string | null>> {
  const { client, run, runId, hello, live, version } = useScope();
  const { sample, sampleIndex } = useScopeSelection();
  const problem = ref<string | null>(null);
  let pending: AbortController | null = null;

  /** Run and prompt, once the prompt was read. */
  const target = computed(() => {
    if (version.value < 0 || runId.value === null || !hasScores(run.value?.header)) return "";
    if (hello.value?.source === "replay" || live.value.kind !== "live") return "";
    if ((sample.value?.promptLength ?? 0) < 2) return "";
    return `${runId.value} ${sampleIndex.value}`;
  });
  watch(
    target,
    async (place) => {
      pending?.abort();
      problem.value = null;
      const [name = "", index = ""] = place.split(" ");
      if (name === "" || sample.value?.row("surprise", 1)) return;
      const mine = new AbortController();
      pending = mine;
      try {
        await client.scores(name, Number(index), mine.signal);
      } catch (error) {
        if (!mine.signal.aborted) problem.value = asApiError(error).message;
      }
    },
    { immediate: true },
  );
  onBeforeUnmount(() => pending?.abort());
  return problem;
}
