/** Scores of the prompt that is shown: the hub sends them to all pages once one of them asks. */
import { computed, onBeforeUnmount, ref, watch, type Ref } from "vue";
import { asApiError } from "../../api/client";
import { isCaptured } from "./emptyStates";
import type { RunHeader } from "../../scope/protocol";
import { useScope } from "./useScope";
import { useScopeSelection } from "./useScopeSelection";

/** Prompts that were read, of runs that look at probabilities. */
const hasScores = (header: RunHeader | undefined): boolean =>
  header !== undefined &&
  header.state !== "queued" &&
  header.state !== "prefill" &&
  isCaptured(header.capture, "probabilities");

/** Returns why there are none; null: they are here, or on their way. */
export function useScores(): Readonly<Ref<string | null>> {
  const { client, run, runId, hello, live, version } = useScope();
  const { sample, sampleIndex } = useScopeSelection();
  const problem = ref<string | null>(null);
  let asking: AbortController | null = null;

  /** Named by run and prompt, once the prompt was read. */
  const wanted = computed(() => {
    if (version.value < 0 || runId.value === null || !hasScores(run.value?.header)) return "";
    if (hello.value?.source === "replay" || live.value.kind !== "live") return "";
    if ((sample.value?.promptLength ?? 0) < 2) return "";
    return `${runId.value} ${sampleIndex.value}`;
  });
  watch(
    wanted,
    async (place) => {
      asking?.abort();
      problem.value = null;
      const [name = "", index = ""] = place.split(" ");
      if (name === "" || sample.value?.row("surprise", 1)) return;
      const mine = new AbortController();
      asking = mine;
      try {
        await client.scores(name, Number(index), mine.signal);
      } catch (error) {
        if (!mine.signal.aborted) problem.value = asApiError(error).message;
      }
    },
    { immediate: true },
  );
  onBeforeUnmount(() => asking?.abort());
  return problem;
}
