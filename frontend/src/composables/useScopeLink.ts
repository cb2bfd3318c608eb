/** Whether the hub has a model for MegaScope; requested once, by pages that link to its screen. */
import { ref, type Ref } from "vue";
import type { ApiClient } from "../api/client";

/** null: no model, or not known yet. */
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
