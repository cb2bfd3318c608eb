/** Attribution of the logit of a token, requested once the selection rests: the model reads the text once more for it. */
import { onBeforeUnmount, ref, shallowRef, watch, type Ref } from "vue";
import { asApiError, isAbort, type ApiError } from "../../../api/client";
import type { Attribution } from "../../../scope/client";
import { useScope } from "../useScope";

export interface AttributionPlace {
  readonly run: string;
  readonly sample: number;
  readonly position: number;
  readonly token: number;
}

const REST_MS = 400;

export function useAttribution(place: Ref<AttributionPlace | null>) {
  const { client } = useScope();
  const found = shallowRef<Attribution | null>(null);
  const problem = shallowRef<ApiError | null>(null);
  const tries = ref(0);
  let timer: ReturnType<typeof setTimeout> | undefined;
  let pending: AbortController | undefined;

  async function request({ run, ...query }: AttributionPlace): Promise<void> {
    const { signal } = (pending = new AbortController());
    try {
      const answer = await client.analysis("attribution", run, { ...query }, signal);
      if (!signal.aborted) [found.value, problem.value] = [answer, null];
    } catch (error) {
      if (!isAbort(error)) [found.value, problem.value] = [null, asApiError(error)];
    }
  }
  function stop(): void {
    clearTimeout(timer);
    pending?.abort();
  }
  watch(
    () => JSON.stringify([place.value, tries.value]),
    () => {
      stop();
      [found.value, problem.value] = [null, null];
      const at = place.value;
      if (at) timer = setTimeout(() => void request(at), REST_MS);
    },
    { immediate: true },
  );
  onBeforeUnmount(stop);
  return { found, problem, retry: () => (tries.value += 1) };
}
