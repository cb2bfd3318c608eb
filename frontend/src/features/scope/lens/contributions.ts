/** Summands of a logit, as the panel of attributions lists them. */
import type { Attribution, Format } from "../../../scope/client";
import { csvText, npyBytes } from "../../../scope/files/npy";
import { ABSENT } from "../../../store/format";

export interface Contribution {
  readonly name: string;
  /** Layer of a head or MLP, and the head; null where there is none. */
  readonly layer: number | null;
  readonly head: number | null;
  readonly value: number;
}

const whole = (name: string, value: number | null): Contribution => ({
  name,
  layer: null,
  head: null,
  value: value ?? NaN,
});

/** All summands, those of the largest magnitude first. */
export function contributionsOf(found: Attribution): Contribution[] {
  const heads = found.heads.flatMap((row, layer) =>
    row.map((value, head) => ({ name: `layer ${layer}, head ${head}`, layer, head, value: value ?? NaN })),
  );
  const perLayer = (
    [
      ["MLP of layer", found.mlp],
      ["attention bias of layer", found.attentionBias],
      ["MLP bias of layer", found.mlpBias],
    ] as const
  ).flatMap(([name, values]) =>
    values.map((value, layer) => ({ name: `${name} ${layer}`, layer, head: null, value: value ?? NaN })),
  );
  const all = [
    whole("embedding", found.embedding),
    ...heads,
    ...perLayer,
    whole("bias of the final norm", found.constant),
  ];
  return all
    .filter(({ value }) => value !== 0)
    .toSorted((a, b) => Math.abs(b.value) - Math.abs(a.value) || 0);
}

/** Largest magnitude of a contribution of a head, for the colour scale. */
export const reachOf = (found: Attribution): number =>
  Math.max(1e-9, ...found.heads.flat().map((value) => Math.abs(value ?? 0)));

export const signed = (value: number | null | undefined): string =>
  value === null || value === undefined || Number.isNaN(value)
    ? ABSENT
    : `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(3)}`;

/** CSV: all summands and their sum; NPY: contributions of the heads, [layers, heads]. */
export function contributionFile(found: Attribution, format: Format): Blob {
  if (format !== "csv") {
    const values = Float32Array.from(found.heads.flat().map((value) => value ?? NaN));
    return new Blob([npyBytes(values, [found.heads.length, found.heads[0]?.length ?? 0])]);
  }
  const lines = contributionsOf(found).map(({ name, layer, head, value }) => [
    name,
    layer ?? "",
    head ?? "",
    value,
  ]);
  const head = ["component", "layer", "head", "contribution"];
  return new Blob([csvText([head, ...lines, ["logit", "", "", found.logit ?? NaN]])], { type: "text/csv" });
}
