/** Which page of a job is shown where the address names none, whether there is a model for MegaScope, and who looks. */
import { computed, onBeforeUnmount, ref, watch, type ComputedRef, type Ref } from "vue";
import type { ApiClient } from "../api/client";
import type { JobView } from "../api/types";
import type { JobState } from "../composables/jobState";
import { useScopeLink, type ScopeSource } from "../composables/useScopeLink";
import { useSelection } from "../composables/useSelection";

/** How often a model that this page has not seen yet is requested. */
const AGAIN_MS = 2000;
/** Phases of a job without ranks that mean that there is a model, ready or not. */
const SERVED: ReadonlySet<string> = new Set(["Running", "Restarting"]);

export interface EntryRoute {
  /** null: no model, or not known yet. */
  readonly scope: Ref<ScopeSource>;
  /** There is a model, and nothing trains. */
  readonly serves: ComputedRef<boolean>;
  readonly page: ComputedRef<"job" | "jobs" | "scope">;
}

/** Ranks train here: there is no model to generate with. */
export const trains = (job: JobView | null): boolean => job !== null && job.ranks.length > 0;
const hasModel = (job: JobView | null): boolean => job !== null && !trains(job) && SERVED.has(job.phase);

/** Opens MegaScope where a model serves or was recorded, and the job's page where ranks train; sets `viewOnly`. */
export function useEntryRoute(
  api: ApiClient,
  { job, viewOnly }: Pick<JobState, "job" | "viewOnly">,
): EntryRoute {
  const { selection } = useSelection();
  const scope = ref<ScopeSource>(null);
  const request = (): void => {
    watch(
      useScopeLink(api),
      ({ source, role }) => {
        scope.value = source;
        viewOnly.value = role === "viewer" ? "Needs the controller role" : undefined;
      },
      { once: true },
    );
  };
  request();
  const timer = setInterval(() => {
    if (scope.value === null && hasModel(job.value) && !document.hidden) request();
  }, AGAIN_MS);
  onBeforeUnmount(() => clearInterval(timer));

  const serves = computed(
    () => scope.value === "replay" || (scope.value === "live" && job.value !== null && !trains(job.value)),
  );
  const page = computed(() => {
    const { page: requested, run } = selection.value;
    return requested ?? (serves.value || run !== null ? "scope" : "job");
  });
  return { scope, serves, page };
}
