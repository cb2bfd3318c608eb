/** An answer of the hub about the newest steps, fetched again as steps end. */
import { onScopeDispose, shallowRef, watch, type ShallowRef } from "vue";
import { asApiError, isAbort, type ApiError } from "../../api/client";

/** While steps end, the answer is fetched at most this often. */
const FOLLOW_MS = 2000;

export type NewestState<T> =
  | { readonly kind: "loading" }
  | { readonly kind: "ready"; readonly view: T }
  | { readonly kind: "error"; readonly error: ApiError };

export interface NewestSource<T> {
  readonly state: ShallowRef<NewestState<T>>;
  readonly retry: () => void;
  /** Fetch at once, and show the older answer until then: the user asked for something else. An error replaces it. */
  readonly reload: () => void;
  /** Fetch the same at once; an error leaves the older answer. */
  readonly refresh: () => void;
}

/** `newest` returns what changes with the newest step. An error shows where there is no older answer to the same question. */
export function useNewest<T>(
  fetchView: (signal: AbortSignal) => Promise<T>,
  newest: () => string,
): NewestSource<T> {
  const state: ShallowRef<NewestState<T>> = shallowRef<NewestState<T>>({ kind: "loading" });
  let pending: AbortController | undefined;
  let timer: ReturnType<typeof setTimeout> | undefined;
  let lastFetch = -Infinity;
  let outdated = false;

  /** `asksElse`: the answer that is shown is to another question. */
  async function load(asksElse = false): Promise<void> {
    // A fetch in time would abort this one, and drop its error.
    clearTimeout(timer);
    pending?.abort();
    const request = (pending = new AbortController());
    lastFetch = Date.now();
    outdated = false;
    try {
      state.value = { kind: "ready", view: await fetchView(request.signal) };
    } catch (error) {
      if (!isAbort(error) && (asksElse || state.value.kind !== "ready"))
        state.value = { kind: "error", error: asApiError(error) };
    }
    if (pending !== request) return;
    pending = undefined;
    if (outdated) follow();
  }

  /** Fetch in time. A hub that answers slowly gets the next request only after its answer, for it computes on. */
  function follow(): void {
    clearTimeout(timer);
    if (pending) {
      outdated = true;
      return;
    }
    const wait = lastFetch + FOLLOW_MS - Date.now();
    if (wait > 0) timer = setTimeout(() => void load(), wait);
    else void load();
  }

  watch(newest, follow, { immediate: true });
  onScopeDispose(() => {
    clearTimeout(timer);
    const last = pending;
    pending = undefined;
    last?.abort();
  });
  return {
    state,
    reload: () => void load(true),
    refresh: () => void load(),
    retry: () => {
      state.value = { kind: "loading" };
      void load();
    },
  };
}
