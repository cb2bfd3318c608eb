/** The selection of a scope screen within what there is: every index exists, or is null. */
import { computed } from "vue";
import { pieceAt } from "../scope/tokenText";
import { useScope } from "./useScope";
import { useSelection } from "./useSelection";

const within = (value: number, count: number): number => Math.min(Math.max(0, value), Math.max(0, count - 1));

export function useScopeSelection() {
  const { run, hello, version } = useScope();
  const { selection, select } = useSelection();
  const sampleIndex = computed(() =>
    version.value >= 0 ? within(selection.value.prompt, run.value?.samples.length ?? 0) : 0,
  );
  const sample = computed(() =>
    version.value >= 0 ? (run.value?.samples[sampleIndex.value] ?? null) : null,
  );
  const length = computed(() => (version.value >= 0 ? (sample.value?.length ?? 0) : 0));
  /** Position of the selected token; the newest while none is. */
  const token = computed(() => within(selection.value.token ?? length.value - 1, length.value));
  /** The newest token that the model has read at or before the selected one: the last one only came out of it. */
  const readToken = computed(() => {
    if (version.value < 0) return 0;
    return within(token.value, Math.max(1, lastRead(length.value, sample.value?.promptLength ?? 0)));
  });
  const layer = computed(() => within(selection.value.layer ?? 0, hello.value?.model.layers ?? 1));
  const head = computed(() => within(selection.value.head ?? 0, hello.value?.model.heads ?? 1));
  const moveToken = (by: number): void => select({ token: within(token.value + by, length.value) });
  const nameOf = (position: number): string =>
    sample.value ? `${pieceAt(sample.value, position).name} at ${position}` : `token ${position}`;
  return {
    selection,
    select,
    sampleIndex,
    sample,
    length,
    token,
    readToken,
    layer,
    head,
    moveToken,
    nameOf,
  };
}

/** How many tokens the model has read: all of a prompt, and all that was generated but the last. */
export const lastRead = (length: number, prompt: number): number => (length > prompt ? length - 1 : length);
