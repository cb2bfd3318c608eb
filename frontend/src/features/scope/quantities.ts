/** What the matrix of layers by tokens can show. */
const short = (value: number): string =>
  Number.isFinite(value) ? String(+value.toPrecision(4)) : String(value);

export const QUANTITIES = [
  {
    value: "residual.norm",
    label: "Norm",
    note: "length of the hidden state after the layer",
    format: short,
  },
  {
    value: "residual.change",
    label: "Change",
    note: "length of what the layer added, over the length before",
    format: short,
  },
  {
    value: "residual.cosine",
    label: "Cosine",
    note: "cosine similarity of the hidden state before and after the layer",
    format: short,
  },
] as const;

export type Quantity = (typeof QUANTITIES)[number]["value"];
