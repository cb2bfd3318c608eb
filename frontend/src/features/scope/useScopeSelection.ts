/** The selection of a scope screen, limited to what exists: every index is valid, or null. */
import { computed, type ComputedRef } from "vue";
import { nearestHead, ownerOf, shards as shardsOf } from "../../scope/layout";
import { shownFor } from "../../scope/views/matrices";
import type { Head } from "../../scope/protocol";
import type { Selection } from "../../store/selection";
import { pieceAt } from "../../scope/views/tokenText";
import { useScope } from "./useScope";
import { useSelection } from "../../composables/useSelection";

const within = (value: number, count: number): number => Math.min(Math.max(0, value), Math.max(0, count - 1));

/** Ranks, and the chosen one: it stays the one that holds the layer and the head. */
function useRank(at: ComputedRef<Head>) {
  const { hello } = useScope();
  const { selection, select: change } = useSelection();
  /** All ranks; one where the model is not shared. */
  const shards = computed(() => (hello.value ? shardsOf(hello.value.model, hello.value.layout) : []));
  /** null: all of them. */
  const shard = computed(() => shards.value.find(({ rank }) => rank === selection.value.rank) ?? null);
  function select(to: Partial<Selection>): void {
    const moves = to.layer !== undefined || to.head !== undefined;
    if (!shard.value || !moves || to.rank !== undefined) return change(to);
    const now = { layer: to.layer ?? at.value.layer, head: to.head ?? at.value.head };
    change({ ...to, rank: ownerOf(shards.value, now)?.rank ?? null });
  }
  function chooseRank(rank: number | null): void {
    const chosen = shards.value.find((one) => one.rank === rank);
    change(chosen ? { rank, ...nearestHead(chosen, at.value) } : { rank: null });
  }
  return { shards, shard, select, chooseRank };
}

export function useScopeSelection() {
  const { run, hello, version } = useScope();
  const { selection } = useSelection();
  const sampleIndex = computed(() =>
    version.value >= 0 ? within(selection.value.prompt, run.value?.samples.length ?? 0) : 0,
  );
  const sample = computed(() =>
    version.value >= 0 ? (run.value?.samples[sampleIndex.value] ?? null) : null,
  );
  const length = computed(() => (version.value >= 0 ? (sample.value?.length ?? 0) : 0));
  /** Position of the selected token; the newest while none is. */
  const token = computed(() => within(selection.value.token ?? length.value - 1, length.value));
  /** The newest token that the model has read at or before the selected one: it has produced the last token but not read it. */
  const readToken = computed(() => {
    if (version.value < 0) return 0;
    return within(token.value, Math.max(1, lastRead(length.value, sample.value?.promptLength ?? 0)));
  });
  const layer = computed(() => within(selection.value.layer ?? 0, hello.value?.model.layers ?? 1));
  const head = computed(() => within(selection.value.head ?? 0, hello.value?.model.heads ?? 1));
  const at = computed(() => ({ layer: layer.value, head: head.value }));
  const { select, ...rank } = useRank(at);
  /** Position whose values of a tensor a panel shows for the token that is read; null: none. */
  const shownToken = (name: string): number | null =>
    version.value >= 0 && sample.value ? shownFor(sample.value, name, readToken.value) : null;
  /** Note for a panel that shows the values of another token than the selected one. */
  const insteadOf = (shown: number | null): string | null =>
    shown === null || shown === readToken.value
      ? null
      : `These are the numbers of ${nameOf(shown)}, not of ${nameOf(readToken.value)}.`;
  const stride = computed(() => (version.value >= 0 ? (sample.value?.stride ?? 1) : 1));
  const moveToken = (by: number): void => select({ token: within(token.value + by, length.value) });
  const nameOf = (position: number): string =>
    sample.value ? `${pieceAt(sample.value, position).name} at ${position}` : `token ${position}`;
  /** For a screen reader. */
  const spokenName = (position: number): string =>
    sample.value ? `${pieceAt(sample.value, position).spoken} at ${position}` : `token ${position}`;
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
    ...rank,
    shownToken,
    insteadOf,
    stride,
    moveToken,
    nameOf,
    spokenName,
  };
}

/** How many tokens the model has read: all of a prompt, and all that was generated but the last. */
export const lastRead = (length: number, prompt: number): number => (length > prompt ? length - 1 : length);
