/** Points of the PCA screen: coordinates of tokens at one layer, exact where the basis was fitted on them. */
import type { RunStore } from "../store/frameStore";
import { FITTED, pcaTable } from "../store/pcaTables";
import { numbersAt } from "./matrices";

export const COMPONENTS = 8;

export interface Point {
  readonly sample: number;
  readonly position: number;
  readonly coordinates: Float32Array;
}

/** Coordinates in the newest basis, of no other. `layer` is the index in the basis's list of layers. */
export function pcaPoints(run: RunStore, layer: number): Point[] {
  const found: Point[] = [];
  run.samples.forEach((sample, index) => {
    for (let position = 0; position < sample.length; position += 1) {
      const name = sample.row(FITTED, position) ? FITTED : pcaTable(run.pca?.version);
      const coordinates = numbersAt(sample, name, position)?.subarray(
        layer * COMPONENTS,
        (layer + 1) * COMPONENTS,
      );
      if (coordinates && coordinates.length === COMPONENTS)
        found.push({ sample: index, position, coordinates });
    }
  });
  return found;
}

/** Smallest and largest of a component, with a margin; never empty. */
export function extent(points: readonly Point[], component: number): { from: number; to: number } {
  const values = points.map(({ coordinates }) => coordinates[component] ?? 0).filter(Number.isFinite);
  const [low, high] = [Math.min(...values, 0), Math.max(...values, 0)];
  const margin = (high - low || 1) * 0.07;
  return { from: low - margin, to: high + margin };
}

/** Share of the total variance that the points have along each component; null without a variance or two points. */
export function explainedShares(points: readonly Point[], total: number): number[] | null {
  const whole = points.filter(({ coordinates }) => coordinates.every(Number.isFinite));
  if (whole.length < 2 || !(total > 0)) return null;
  return Array.from({ length: COMPONENTS }, (_, component) => {
    const values = whole.map(({ coordinates }) => coordinates[component] ?? 0);
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    return values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / values.length / total;
  });
}

/** A coordinate as text: five significant digits. */
export const short = (value: number | undefined): string =>
  value === undefined ? "" : String(+value.toPrecision(5));
