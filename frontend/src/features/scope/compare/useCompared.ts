/** What differences of any view need: sizes that both runs have, the selection within them, names of tokens. */
import { computed } from "vue";
import { pieceAt } from "../../../scope/views/tokenText";
import type { PanelMessage } from "../emptyStates";
import { labelRoom } from "../texts";
import { useScope, type ScopeApi } from "../useScope";
import { useScopeSelection } from "../useScopeSelection";
import { commonCount, commonRead, type Samples } from "./differences";

export interface Compared {
  readonly second: ScopeApi;
  readonly samples: Samples;
}

export const NOTHING_COMMON: PanelMessage = {
  kind: "empty",
  title: "No number is in both runs",
  hint: "One of them does not capture this, or its values have not arrived.",
};

export function useCompared(props: Compared) {
  const { hello, version } = useScope();
  const { token, readToken, layer, head, ...rest } = useScopeSelection();
  const models = computed(() => [hello.value?.model, props.second.hello.value?.model] as const);
  const both = (of: "layers" | "heads"): number => Math.min(...models.value.map((one) => one?.[of] ?? 1));
  const layers = computed(() => both("layers"));
  const heads = computed(() => both("heads"));
  const count = computed(() => (version.value >= 0 ? commonCount(props.samples) : 0));
  const read = computed(() => (version.value >= 0 ? commonRead(props.samples) : 0));
  const tokenName = (position: number): string => {
    const { a, b } = props.samples;
    const [ofA, ofB] = [pieceAt(a, position).label, pieceAt(b, position).label];
    return ofA === ofB ? ofA : `${ofA}/${ofB}`;
  };
  return {
    ...rest,
    version,
    models,
    layers,
    heads,
    count,
    read,
    token: computed(() => Math.min(token.value, count.value - 1)),
    readToken: computed(() => Math.min(readToken.value, read.value - 1)),
    layer: computed(() => Math.min(layer.value, layers.value - 1)),
    head: computed(() => Math.min(head.value, heads.value - 1)),
    tokenName,
    layerName: (row: number): string => `layer ${row}`,
    labelPixels: computed(() =>
      version.value >= 0
        ? Math.max(labelRoom(props.samples.a, count.value), labelRoom(props.samples.b, count.value))
        : 20,
    ),
  };
}
