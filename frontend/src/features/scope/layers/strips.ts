/** States of a token that are shown as strips of pixels. */
export const STRIP_KINDS = [
  { title: "Q K V", names: ["q", "k", "v"] },
  { title: "MLP", names: ["mlp1", "mlp2"] },
] as const;

export type StripName = (typeof STRIP_KINDS)[number]["names"][number];

const TITLES: Readonly<Record<string, string>> = {
  q: "Query",
  k: "Key",
  v: "Value",
  mlp1: "MLP 1 (fc1)",
  mlp2: "MLP 2 (fc2)",
};

/** Sites of plugins have the names under which they were registered. */
export const stripTitle = (name: string): string => TITLES[name] ?? name;

/** A pixel as text: three significant digits. */
export const stripNumber = (value: number | undefined): string =>
  value === undefined ? "" : Number.isFinite(value) ? String(+value.toPrecision(3)) : String(value);
