/** Colour maps of MegaScope in addition to those of colour.ts, one meaning each: probabilities, and numbers with a sign. */
import { bake, type ColourMap, type Rgb, type ThemeName } from "./colour";

/** Large values are bright on dark and dark on light. */
const PROBABILITY: Readonly<Record<ThemeName, readonly Rgb[]>> = {
  dark: [
    [10, 10, 22],
    [34, 17, 80],
    [85, 22, 128],
    [136, 39, 129],
    [187, 56, 120],
    [231, 84, 99],
    [251, 137, 97],
    [254, 196, 137],
    [252, 253, 191],
  ],
  light: [
    [252, 249, 236],
    [254, 217, 164],
    [253, 166, 110],
    [244, 110, 92],
    [205, 66, 113],
    [153, 45, 128],
    [102, 26, 128],
    [51, 16, 96],
    [12, 8, 30],
  ],
};

/** Purple below zero, orange above; zero is the quiet middle. */
const SIGNED: Readonly<Record<ThemeName, readonly Rgb[]>> = {
  dark: [
    [206, 190, 255],
    [146, 122, 220],
    [82, 70, 138],
    [30, 36, 46],
    [122, 72, 22],
    [216, 132, 38],
    [255, 204, 128],
  ],
  light: [
    [70, 30, 122],
    [118, 100, 178],
    [186, 178, 220],
    [248, 248, 248],
    [252, 190, 112],
    [220, 124, 18],
    [146, 68, 4],
  ],
};

const themed = (stops: Readonly<Record<ThemeName, readonly Rgb[]>>) => ({
  dark: bake(stops.dark),
  light: bake(stops.light),
});
const TABLES = { probability: themed(PROBABILITY), signed: themed(SIGNED) };
const unit = (value: number): number => Math.min(1, Math.max(0, value));

/** Probabilities on a square-root scale, as `u8s` codes them: small ones stay visible. */
export const probabilityMap = (theme: ThemeName, high = 1): ColourMap => ({
  position: (value) => Math.sqrt(unit(value / high)),
  table: TABLES.probability[theme],
  marks: [0, high],
});

/** Numbers with a sign from -`reach` to `reach`. */
export const signedMap = (theme: ThemeName, reach: number): ColourMap => ({
  position: (value) => unit(0.5 + value / (2 * (reach || 1))),
  table: TABLES.signed[theme],
  marks: [-reach, 0, reach],
});
