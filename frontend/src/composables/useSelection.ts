/** The one selection, shared by all panels and written to the URL. */
import { readonly, ref, watch, type DeepReadonly, type Ref } from "vue";
import { formatSelection, parseSelection, type Selection } from "../store/selection";

const state = ref<Selection>(parseSelection(window.location.search));

window.addEventListener("popstate", () => (state.value = parseSelection(window.location.search)));

/** A new page or step makes an entry of the browser's history; a rank, a span or a metric changes the current one. */
const remember = (now: Selection, before: Selection): void => {
  const query = formatSelection(now);
  if (query === window.location.search) return;
  const url = window.location.pathname + query;
  const moved =
    now.job !== before.job ||
    now.page !== before.page ||
    now.run !== before.run ||
    now.with !== before.with ||
    now.view !== before.view ||
    (now.step !== before.step && now.step !== null);
  if (moved) window.history.pushState(null, "", url);
  else window.history.replaceState(null, "", url);
};

/** Changing the address takes milliseconds, so requests to the hub that follow from the selection are sent first. */
watch(state, remember, { flush: "post" });

export interface SelectionApi {
  readonly selection: DeepReadonly<Ref<Selection>>;
  readonly select: (change: Partial<Selection>) => void;
  readonly clear: () => void;
}

/** Changing the step drops the span, which belongs to one step only, unless a new span is given. */
export function useSelection(): SelectionApi {
  const select = (change: Partial<Selection>): void => {
    const leaves = change.step !== undefined && change.step !== state.value.step;
    state.value = { ...state.value, ...(leaves ? { span: null } : {}), ...change };
  };
  const clear = (): void => select({ rank: null, span: null, step: null });
  return { selection: readonly(state), select, clear };
}
