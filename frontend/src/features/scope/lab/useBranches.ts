/** Comparisons or sweeps of the hub: starts, lists, follows and cancels them. */
import { onBeforeUnmount, ref, shallowRef } from "vue";
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

/** `id` is the name of the field that identifies one; `query` is added when one is read. */
export function useBranches<S extends Branch, T extends S>(path: string, id: keyof S & string, query = "") {
  const { api } = useScope().client;
  const [list, shown] = [shallowRef<readonly S[]>([]), shallowRef<T | null>(null)];
  const [problem, busy] = [ref<string | null>(null), ref(false)];
  let chosen: string | null = null;
  let timer: ReturnType<typeof setTimeout> | undefined;
  const stopped = new AbortController();
  const at = (name: string): string => `${api.root}scope/${path}/${encodeURIComponent(name)}`;
  const request = (address: string, init = {}) => api.send(address, { signal: stopped.signal, ...init });
  const read = async <R>(address: string, init?: RequestInit): Promise<R> =>
    (await (await request(address, init)).json()) as R;

  async function attempt(action: () => Promise<void>): Promise<void> {
    problem.value = null;
    try {
      await action();
    } catch (error) {
      if (!isAbort(error)) problem.value = errorText(asApiError(error));
    }
  }
  const refresh = (): Promise<void> =>
    attempt(async () => void (list.value = await read<S[]>(`${api.root}scope/${path}`)));
  async function follow(name: string): Promise<void> {
    clearTimeout(timer);
    chosen = name;
    await attempt(async () => {
      const found = await read<T>(at(name) + query);
      if (chosen !== name) return;
      shown.value = found;
      if (isOpen(found)) timer = setTimeout(() => void follow(name), EVERY_MS);
      else await refresh();
    });
    if (problem.value !== null && chosen === name && shown.value && isOpen(shown.value))
      timer = setTimeout(() => void follow(name), AGAIN_MS);
  }
  async function start(body: unknown): Promise<void> {
    busy.value = true;
    await attempt(async () => {
      const init = { method: "POST", headers: JSON_BODY, body: JSON.stringify(body) };
      const answer = (await (await request(`${api.root}scope/${path}`, init)).json()) as Record<
        string,
        string
      >;
      await refresh();
      await follow(answer[id] ?? "");
    });
    busy.value = false;
  }
  /** A page that is opened again shows the newest one. */
  void refresh().then(() => chosen ?? (list.value[0] && void follow(String(list.value[0][id]))));
  onBeforeUnmount(() => (clearTimeout(timer), stopped.abort()));
  return {
    list,
    shown,
    problem,
    busy,
    follow,
    start,
    cancel: (name: string) => attempt(async () => void (await request(at(name), { method: "DELETE" }))),
    csv: (name: string): string => `${at(name)}?format=csv`,
  };
}
