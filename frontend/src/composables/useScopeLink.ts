/** Whether the hub has a model that can be looked at; asked once, by pages that lead to the scope screen. */
import { ref, type Ref } from "vue";
import type { ApiClient } from "../api/client";

/** null: there is none, or not known yet. */
export type ScopeSource = "live" | "replay" | null;

export function useScopeLink(api: ApiClient): Ref<ScopeSource> {
  const found = ref<ScopeSource>(null);
  api
    .send(`${api.root}scope`, {})
    .then((answer) => answer.json() as Promise<{ source?: ScopeSource; model?: unknown }>)
    .then(
      ({ source, model }) => (found.value = model ? (source ?? null) : null),
      () => undefined,
    );
  return found;
}
