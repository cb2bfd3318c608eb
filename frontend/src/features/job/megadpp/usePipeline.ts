/** Plans and steps of the job's pipeline, fetched again as steps end. */
import { onBeforeUnmount, shallowRef, watch, type ShallowRef } from "vue";
import { asApiError, isAbort, type ApiClient, type ApiError } from "../../../api/client";
import type { PipelineView } from "../../../api/types";

/** While steps end, the answer is fetched at most this often. */
const FOLLOW_MS = 2000;

export type PipelineState =
  | { readonly kind: "loading" }
  | { readonly kind: "ready"; readonly view: PipelineView }
  | { readonly kind: "error"; readonly error: ApiError };

export interface PipelineSource {
  readonly state: ShallowRef<PipelineState>;
  readonly retry: () => void;
}

/** `newest` returns what changes with the newest step. An error shows only where there is nothing older to show. */
export function usePipeline(client: ApiClient, newest: () => string): PipelineSource {
  const state = shallowRef<PipelineState>({ kind: "loading" });
  let pending: AbortController | undefined;
  let timer: ReturnType<typeof setTimeout> | undefined;
  let lastFetch = -Infinity;

  async function load(): Promise<void> {
    pending?.abort();
    const { signal } = (pending = new AbortController());
    lastFetch = Date.now();
    try {
      state.value = { kind: "ready", view: await client.pipeline(signal) };
    } catch (error) {
      if (!isAbort(error) && state.value.kind !== "ready")
        state.value = { kind: "error", error: asApiError(error) };
    }
  }

  watch(
    newest,
    () => {
      clearTimeout(timer);
      const wait = lastFetch + FOLLOW_MS - Date.now();
      if (wait > 0) timer = setTimeout(() => void load(), wait);
      else void load();
    },
    { immediate: true },
  );
  onBeforeUnmount(() => {
    clearTimeout(timer);
    pending?.abort();
  });
  return {
    state,
    retry: () => {
      state.value = { kind: "loading" };
      void load();
    },
  };
}
