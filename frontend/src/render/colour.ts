/**
 * Colour maps, one meaning each. Magnitude: viridis (light is much). Slowdown: diverging around 1.0x in log2, blue is
 * faster and orange slower than the peers. Both read the same to people with a colour vision deficiency.
 */

export type Rgb = readonly [number, number, number];
export type ThemeName = "dark" | "light";

const VIRIDIS: readonly Rgb[] = [
  [68, 1, 84],
  [71, 45, 123],
  [59, 82, 139],
  [44, 114, 142],
  [33, 145, 140],
  [40, 174, 128],
  [94, 201, 98],
  [173, 220, 48],
  [253, 231, 37],
];

/** The same grey from 0.8x to 1.25x; faster ranks have muted colours, because they are no problem. */
const SLOWDOWN: Readonly<Record<ThemeName, readonly Rgb[]>> = {
  dark: [
    [92, 132, 178],
    [52, 76, 104],
    [35, 43, 54],
    [35, 43, 54],
    [35, 43, 54],
    [168, 82, 34],
    [255, 150, 84],
  ],
  light: [
    [104, 146, 194],
    [182, 203, 226],
    [236, 239, 243],
    [236, 239, 243],
    [236, 239, 243],
    [240, 150, 90],
    [176, 52, 4],
  ],
};

/** Slowdowns outside 1/LIMIT .. LIMIT take the end colours. */
export const SLOWDOWN_LIMIT = 2;

const TABLE_SIZE = 256;

/** A table of 256 colours, three bytes each, through these stops. */
export function bake(stops: readonly Rgb[]): Uint8ClampedArray {
  const table = new Uint8ClampedArray(TABLE_SIZE * 3);
  for (let index = 0; index < TABLE_SIZE; index += 1) {
    const at = (index / (TABLE_SIZE - 1)) * (stops.length - 1);
    const left = Math.min(Math.floor(at), stops.length - 2);
    const low = stops[left] ?? [0, 0, 0];
    const high = stops[left + 1] ?? low;
    for (const channel of [0, 1, 2] as const) {
      table[index * 3 + channel] = low[channel] + (high[channel] - low[channel]) * (at - left);
    }
  }
  return table;
}

const TABLES = {
  magnitude: bake(VIRIDIS),
  dark: bake(SLOWDOWN.dark),
  light: bake(SLOWDOWN.light),
};

/** A colour map: where a value lies in 0 .. 1, and the colour there. */
export interface ColourMap {
  readonly position: (value: number) => number;
  readonly table: Uint8ClampedArray;
  /** Values to label on the colour bar. */
  readonly marks: readonly number[];
}

const unit = (value: number): number => Math.min(1, Math.max(0, value));

/** Magnitudes from `low` to `high`, linear. */
export function magnitudeMap(low: number, high: number): ColourMap {
  const size = high - low || 1;
  return { position: (value) => unit((value - low) / size), table: TABLES.magnitude, marks: [low, high] };
}

/** Ratios to the peers, log2 around 1. */
export function slowdownMap(theme: ThemeName): ColourMap {
  const reach = Math.log2(SLOWDOWN_LIMIT);
  return {
    position: (value) => unit(0.5 + Math.log2(Math.max(value, 1e-9)) / (2 * reach)),
    table: TABLES[theme],
    marks: [1 / SLOWDOWN_LIMIT, 1, SLOWDOWN_LIMIT],
  };
}

/** Index of the three bytes of the colour of `value` in the table. */
export const tableIndex = (map: ColourMap, value: number): number =>
  Math.round(map.position(value) * (TABLE_SIZE - 1)) * 3;

/** Colour of `value` as three bytes. */
export function colourAt(map: ColourMap, value: number): Rgb {
  const index = tableIndex(map, value);
  return [map.table[index] ?? 0, map.table[index + 1] ?? 0, map.table[index + 2] ?? 0];
}

export const css = ([red, green, blue]: Rgb): string => `rgb(${red} ${green} ${blue})`;

/** A CSS gradient over the whole map, for a colour bar. */
export function gradient(map: ColourMap, stops = 9): string {
  const colours = Array.from({ length: stops }, (_, index) => {
    const at = Math.round((index / (stops - 1)) * (TABLE_SIZE - 1)) * 3;
    return css([map.table[at] ?? 0, map.table[at + 1] ?? 0, map.table[at + 2] ?? 0]);
  });
  return `linear-gradient(to right, ${colours.join(", ")})`;
}
