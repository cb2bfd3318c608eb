/** What the matrix of layers by tokens can show, and its colours. */
import { magnitudeMap, type ColourMap, type ThemeName } from "../../../render/colour";
import { signedMap } from "../../../render/maps";
import type { Domain } from "../../../scope/views/matrices";

const short = (value: number): string =>
  Number.isFinite(value) ? String(+value.toPrecision(4)) : String(value);

export const QUANTITIES = [
  {
    value: "residual.norm",
    label: "Norm",
    note: "length of the hidden state after the layer",
    format: short,
    signed: false,
  },
  {
    value: "residual.change",
    label: "Change",
    note: "length of what the layer added, over the length before",
    format: short,
    signed: false,
  },
  {
    value: "residual.cosine",
    label: "Cosine",
    note: "cosine similarity of the hidden state before and after the layer",
    format: short,
    signed: true,
  },
] as const;

export type Quantity = (typeof QUANTITIES)[number]["value"];

/** Diverging around 0 for numbers with a sign, sequential for magnitudes. */
export const quantityMap = (theme: ThemeName, signed: boolean, { low, high }: Domain): ColourMap =>
  signed ? signedMap(theme, high) : magnitudeMap(low, high);
