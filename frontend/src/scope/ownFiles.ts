/** Files of numbers that the page itself holds. */
import type { Format } from "./client";
import { csvText, npyBytes } from "./npy";
import { COMPONENTS, type Point } from "./pcaPoints";
import type { Head } from "./protocol";
import type { SampleStore } from "./sampleStore";

type Line = readonly (string | number)[];

const csv = (head: Line, lines: readonly Line[]): Blob =>
  new Blob([csvText([head, ...lines])], { type: "text/csv" });
const npy = (values: readonly number[], shape: readonly number[]): Blob =>
  new Blob([npyBytes(Float32Array.from(values), shape)]);

/** Tokens of a prompt and of what came after it; in NPY the surprise alone. */
export function tokenFile(sample: SampleStore, surprise: (position: number) => number, format: Format): Blob {
  const lines = sample.ids.map((id, at) => [at, id, sample.texts[at] ?? "", surprise(at)] as const);
  if (format === "csv") return csv(["position", "id", "text", "surprise"], lines);
  return npy(
    lines.map((line) => line[3]),
    [lines.length],
  );
}

/** Coordinates of points, [points, components]. */
export function pcaFile(points: readonly Point[], format: Format): Blob {
  const lines = points.map(({ sample, position, coordinates }) => [sample, position, ...coordinates]);
  const head = ["prompt", "position", ...Array.from({ length: COMPONENTS }, (_, at) => `pc${at + 1}`)];
  if (format === "csv") return csv(head, lines);
  return npy(
    lines.flatMap((line) => line.slice(2)),
    [lines.length, COMPONENTS],
  );
}

/** Statistics of all heads, [layers, heads, statistics]. */
export function headFile(
  { layers, heads }: { readonly layers: number; readonly heads: number },
  names: readonly string[],
  valueOf: (name: string, head: Head) => number,
  format: Format,
): Blob {
  const lines = Array.from({ length: layers * heads }, (_, index) => {
    const of = { layer: Math.floor(index / heads), head: index % heads };
    return [of.layer, of.head, ...names.map((name) => valueOf(name, of))];
  });
  if (format === "csv") return csv(["layer", "head", ...names], lines);
  return npy(
    lines.flatMap((line) => line.slice(2)),
    [layers, heads, names.length],
  );
}

/** Entropy and surprise along a text, [2, positions]. */
export function curveFile(entropy: Float32Array, surprise: Float32Array, format: Format): Blob {
  if (format !== "csv") return npy([...entropy, ...surprise], [2, entropy.length]);
  const lines = [...entropy].map((value, at) => [at, value, surprise[at] ?? Number.NaN]);
  return csv(["position", "entropy", "surprise"], lines);
}
