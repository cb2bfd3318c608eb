/** Whether the hub has a model for MegaScope, and what the caller may do; requested once, by pages that link to its screen. */
import { shallowRef, type ShallowRef } from "vue";
import type { ApiClient } from "../api/client";
import type { EarlyHello } from "../scope/protocol";

/** null: no model, or not known yet. */
export type ScopeSource = "live" | "replay" | null;

export interface ScopeLink {
  readonly source: ScopeSource;
  /** Absent: not known. */
  readonly role?: EarlyHello["role"] | undefined;
}

export function useScopeLink(api: ApiClient): ShallowRef<ScopeLink> {
  const found = shallowRef<ScopeLink>({ source: null });
  api
    .send(`${api.root}scope`, {})
    .then((answer) => answer.json() as Promise<Partial<EarlyHello>>)
    .then(
      ({ source, model, role }) => (found.value = { source: model ? (source ?? null) : null, role }),
      () => undefined,
    );
  return found;
}
