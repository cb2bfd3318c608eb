/** Comparisons or sweeps of the hub: starts, lists, follows and cancels them. */
import { computed, onBeforeUnmount, ref, shallowRef } from "vue";
import { ApiError, asApiError, errorText, isAbort } from "../../../api/client";
import type { Schemas } from "../../../api/types";
import { useScope } from "../useScope";

/** How often one that runs is requested. */
const EVERY_MS = 400;
/** After an error: the hub may be restarted. */
const AGAIN_MS = 2000;
const JSON_BODY = { "Content-Type": "application/json" };

interface Branch {
  readonly state: string;
}

/** Why one failed. */
export const failureText = ({ message, hint }: Schemas["RunError"]): string =>
  errorText(new ApiError(0, message, hint));
export const isOpen = ({ state }: Branch): boolean => state === "queued" || state === "running";

const json = async <R>(answer: Promise<Response>): Promise<R> => (await (await answer).json()) as R;

/** Errors of the last action and of the last reading: what is read later does not hide why an action failed. */
function useProblems() {
  const [refusal, unread] = [ref<string | null>(null), ref<string | null>(null)];
  const report = (error: unknown, into = unread): undefined => {
    if (!isAbort(error)) into.value = errorText(asApiError(error));
  };
  /** undefined: the action failed. */
  const act = <R>(action: () => Promise<R>): Promise<R | undefined> => {
    refusal.value = null;
    return action().catch((error: unknown) => report(error, refusal));
  };
  return { unread, problem: computed(() => refusal.value ?? unread.value), report, act };
}

/** `id` is the name of the field that identifies one; `query` is added when one is read. */
export function useBranches<S extends Branch, T extends S>(path: string, id: keyof S & string, query = "") {
  const { api } = useScope().client;
  const stopped = new AbortController();
  const root = `${api.root}scope/${path}`;
  const at = (name: string): string => `${root}/${encodeURIComponent(name)}`;
  const send = (address: string, init = {}) => api.send(address, { signal: stopped.signal, ...init });
  const { unread, problem, report, act } = useProblems();
  const [list, shown] = [shallowRef<readonly S[]>([]), shallowRef<T | null>(null)];
  const busy = ref(false);
  let chosen: string | null = null;
  let timer: ReturnType<typeof setTimeout> | undefined;

  const refresh = (): Promise<void> =>
    json<S[]>(send(root)).then((found) => void (list.value = found), report);
  async function follow(name: string): Promise<void> {
    clearTimeout(timer);
    chosen = name;
    let next = 0;
    try {
      const found = await json<T>(send(at(name) + query));
      if (chosen !== name) return;
      shown.value = found;
      unread.value = null;
      if (isOpen(found)) next = EVERY_MS;
    } catch (error) {
      if (chosen !== name || isAbort(error)) return;
      report(error);
      const { status } = asApiError(error);
      if (status === 0 || status >= 500) next = AGAIN_MS;
    }
    if (next) timer = setTimeout(() => void follow(name), next);
    else await refresh();
  }
  /** Returns the name; null: none was started. */
  async function start(body: unknown): Promise<string | null> {
    busy.value = true;
    const init = { method: "POST", headers: JSON_BODY, body: JSON.stringify(body) };
    const name = (await act(() => json<Record<string, string>>(send(root, init))))?.[id] ?? null;
    if (name !== null) {
      await refresh();
      await follow(name);
    }
    busy.value = false;
    return name;
  }
  /** A page that is opened again shows the newest one. */
  void refresh().then(() => chosen ?? (list.value[0] && void follow(String(list.value[0][id]))));
  onBeforeUnmount(() => (clearTimeout(timer), stopped.abort()));
  return {
    list,
    shown,
    problem,
    busy,
    follow: (name: string) => act(() => follow(name)),
    start,
    cancel: (name: string) => act(() => send(at(name), { method: "DELETE" })),
    csv: (name: string): string => `${at(name)}?format=csv`,
  };
}
