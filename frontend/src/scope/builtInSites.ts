// Made from the types by 'make generate'; do not edit.
/** Sites that every model has; all others are of plugins. */
export const BUILT_IN_SITES: ReadonlySet<string> = new Set([
  "embedding",
  "q",
  "k",
  "v",
  "head_output",
  "attention_output",
  "mlp2",
  "mlp_in",
  "mlp1",
  "residual",
  "final_norm",
  "logits",
  "attention",
]);
