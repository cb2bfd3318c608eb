/** Files of numbers that the page has. */
import type { Format } from "../client";
import { csvText, npyBytes } from "./npy";
import { COMPONENTS, type Point } from "../views/pcaPoints";
import type { Head } from "../protocol";
import type { SampleStore } from "../store/sampleStore";

/** A file that a panel saves in addition to its picture and numbers. */
export interface ExportFile {
  readonly label: string;
  readonly name: string;
  readonly title: string;
  readonly make: () => Blob;
}

type Line = readonly (string | number)[];

const csv = (head: Line, lines: readonly Line[]): Blob =>
  new Blob([csvText([head, ...lines])], { type: "text/csv" });
const npy = (values: readonly number[], shape: readonly number[]): Blob =>
  new Blob([npyBytes(Float32Array.from(values), shape)]);

/** Tokens of a prompt and of what was generated; in NPY the surprisal alone. */
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

/** Entropy and surprisal along a text, [2, positions]. */
export function curveFile(entropy: Float32Array, surprise: Float32Array, format: Format): Blob {
  if (format !== "csv") return npy([...entropy, ...surprise], [2, entropy.length]);
  const lines = [...entropy].map((value, at) => [at, value, surprise[at] ?? Number.NaN]);
  return csv(["position", "entropy", "surprise"], lines);
}

/** A candidate token, as the page shows it. */
export interface Candidate {
  readonly id: number;
  /** Of the token alone; undefined if it is unknown. */
  readonly text: string | undefined;
  readonly logit: number;
  /** Of the model, at temperature 1. */
  readonly model: number;
  /** At the selected temperature. */
  readonly now: number;
  readonly chosen: boolean;
  /** Top-k and top-p leave it out; `doubtful`: the values that were sent do not determine it. */
  readonly cut: boolean;
  readonly doubtful: boolean;
}

/** Position of the candidates, and the sampling rules under which they are shown. */
export interface CandidatePlace {
  readonly run: string;
  readonly prompt: number;
  readonly position: number;
  readonly temperature: number;
  readonly cutAt: { readonly temperature: number; readonly topK: number; readonly topP: number };
}

const drawn = ({ cut, doubtful }: Candidate): string => (cut ? "no" : doubtful ? "unknown" : "yes");

/** Candidates by falling logit; JSON also names the position. */
export function candidateFile(
  candidates: readonly Candidate[],
  place: CandidatePlace,
  format: "csv" | "json",
): Blob {
  if (format === "csv") {
    const head = [
      "id",
      "text",
      "logit",
      "probability",
      `probability at ${place.temperature}`,
      "came",
      "allowed",
    ];
    return csv(
      head,
      candidates.map((one) => [
        ...[one.id, one.text ?? "", one.logit, one.model, one.now],
        ...[one.chosen ? "yes" : "no", drawn(one)],
      ]),
    );
  }
  const entries = candidates.map((one) => ({
    ...{ id: one.id, text: one.text ?? null, logit: one.logit },
    ...{ probability: one.model, probabilityAt: one.now, came: one.chosen, allowed: drawn(one) },
  }));
  return new Blob([JSON.stringify({ ...place, candidates: entries }, null, 2)], { type: "application/json" });
}
