/** Numbers of two runs, A and B, over what both have. NaN: one of them has none. */
import type { Lens } from "../../../scope/client";
import type { RunStore } from "../../../scope/store/frameStore";
import type { SampleStore } from "../../../scope/store/sampleStore";
import { numbersAt } from "../../../scope/views/matrices";
import { COMPONENTS, pcaPoints } from "../../../scope/views/pcaPoints";
import { whatIf, TEMPERATURES } from "../../../scope/views/temperatureWhatIf";

/** Row-major matrices of A and B. */
export interface Pair {
  readonly rows: number;
  readonly columns: number;
  readonly a: Float32Array;
  readonly b: Float32Array;
}

export interface Samples {
  readonly a: SampleStore;
  readonly b: SampleStore;
}

type ValueAt = (row: number, column: number) => number | null | undefined;

const filled = (rows: number, columns: number, value: ValueAt): Float32Array =>
  Float32Array.from(
    { length: rows * columns },
    (_, at) => value(Math.floor(at / columns), at % columns) ?? Number.NaN,
  );

export const pairOf = (rows: number, columns: number, a: ValueAt, b: ValueAt): Pair => ({
  rows,
  columns,
  a: filled(rows, columns, a),
  b: filled(rows, columns, b),
});

export const differenceOf = ({ a, b }: Pair): Float32Array =>
  b.map((value, at) => value - (a[at] ?? Number.NaN));

/** Positions that both texts have; `read`: that both models have read. */
export const commonCount = ({ a, b }: Samples): number => Math.min(a.length, b.length);
export const commonRead = ({ a, b }: Samples): number => Math.min(a.read, b.read);

/** The first position whose tokens differ; null: there is none among the common ones. */
export function firstDifferent({ a, b }: Samples): number | null {
  const at = a.ids.slice(0, commonCount({ a, b })).findIndex((id, position) => id !== b.ids[position]);
  return at < 0 ? null : at;
}

/** A quantity of each layer and token. */
export function layersPair({ a, b }: Samples, name: string, layers: number): Pair {
  const columns = commonRead({ a, b });
  const read = (sample: SampleStore): ValueAt => {
    const rows = Array.from({ length: columns }, (_, position) => numbersAt(sample, name, position));
    return (layer, position) => rows[position]?.[layer];
  };
  return pairOf(layers, columns, read(a), read(b));
}

export interface Sizes {
  readonly layers: number;
  /** Numbers of each layer in A and in B. */
  readonly a: number;
  readonly b: number;
}

/** Numbers [layers, width] of one token: of what both have. */
export function tokenPair({ a, b }: Samples, name: string, position: number, sizes: Sizes): Pair {
  const read = (sample: SampleStore, width: number): ValueAt => {
    const values = numbersAt(sample, name, position);
    return (layer, at) => values?.[layer * width + at];
  };
  return pairOf(sizes.layers, Math.min(sizes.a, sizes.b), read(a, sizes.a), read(b, sizes.b));
}

/** Pixels of a layer that a run has sent of a state. */
export const pixelsOf = (sample: SampleStore, name: string, layers: number): number =>
  Math.floor(sample.shapeOf(name).reduce((size, part) => size * part, 1) / Math.max(1, layers));

/** Surprisal and entropy of each token. */
export function scoresPair({ a, b }: Samples): Pair {
  const read =
    (sample: SampleStore): ValueAt =>
    (row, position) =>
      sample.row(row === 0 ? "surprise" : "entropy", position)?.data[0];
  return pairOf(2, commonCount({ a, b }), read(a), read(b));
}

function probabilitiesAt(sample: SampleStore, position: number): ReadonlyMap<number, number> {
  const [ids, logits, partition] = ["top.id", "top.logit", "partition"].map((name) =>
    sample.row(name, position),
  );
  if (!ids || !logits || !partition) return new Map();
  const found = whatIf(logits.data as Float32Array, partition.data as Float32Array, TEMPERATURES.indexOf(1));
  return new Map([...ids.data].map((id, at) => [id, found[at] ?? Number.NaN]));
}

/** Candidates of either run, the most probable first. What is not among the candidates of a run is unknown there. */
export function candidatesPair({ a, b }: Samples, position: number): Pair & { readonly ids: number[] } {
  const [ofA, ofB] = [probabilitiesAt(a, position), probabilitiesAt(b, position)];
  const largest = (id: number): number => Math.max(ofA.get(id) ?? 0, ofB.get(id) ?? 0);
  const both = ofA.size > 0 && ofB.size > 0;
  const ids = both
    ? [...new Set([...ofA.keys(), ...ofB.keys()])].sort((x, y) => largest(y) - largest(x))
    : [];
  const at =
    (of: ReadonlyMap<number, number>): ValueAt =>
    (_, column) =>
      of.get(ids[column] ?? -1);
  return { ...pairOf(1, ids.length, at(ofA), at(ofB)), ids };
}

/** Whether coordinates of both runs are in the same basis. */
export function sameBasis({ pca: a }: RunStore, { pca: b }: RunStore): boolean {
  if (!a || !b || a.version !== b.version || a.sources.length === 0) return false;
  return JSON.stringify([a.layers, a.sources]) === JSON.stringify([b.layers, b.sources]);
}

/** Coordinates of each component and token at a layer. */
export function pcaPair(a: RunStore, b: RunStore, sample: number, layer: number): Pair {
  const index = Math.max(0, a.pca?.layers.indexOf(layer) ?? 0);
  const read = (run: RunStore): ValueAt => {
    const points = pcaPoints(run, index).filter((point) => point.sample === sample);
    const found = new Map(points.map(({ position, coordinates }) => [position, coordinates]));
    return (component, position) => found.get(position)?.[component];
  };
  const samples = [a.samples[sample], b.samples[sample]];
  const columns = Math.min(...samples.map((one) => one?.read ?? 0));
  return pairOf(COMPONENTS, columns, read(a), read(b));
}

export const LENS_QUANTITIES = [
  { value: "entropy", label: "Entropy", note: "entropy of what each layer predicts, in nats" },
  {
    value: "target",
    label: "Next token",
    note: "log-probability of the token that follows, where it is the same",
  },
  { value: "top", label: "Top token", note: "log-probability of the likeliest token" },
] as const;
export type LensQuantity = (typeof LENS_QUANTITIES)[number]["value"];

/** Positions of two lenses that both have, in order. */
export const lensPositions = (a: Lens, b: Lens): number[] =>
  a.positions.filter((position) => b.positions.includes(position));

/** Over the positions of both; `same` says whether the token after a position is the same in both. */
export function lensPair(
  a: Lens,
  b: Lens,
  quantity: LensQuantity,
  same: (position: number) => boolean,
): Pair {
  const positions = lensPositions(a, b);
  const read = (lens: Lens): ValueAt => {
    const columns = positions.map((position) => lens.positions.indexOf(position));
    return (row, at) => {
      const column = columns[at] ?? -1;
      if (quantity === "entropy") return lens.entropy[row]?.[column];
      if (quantity === "top") return lens.logprobs[row]?.[column]?.[0];
      return same(positions[at] ?? -1) ? lens.targetLogprob[row]?.[column] : null;
    };
  };
  return pairOf(Math.min(a.layers.length, b.layers.length), positions.length, read(a), read(b));
}

/** Positions of a cell of `scale` of them; the last cell may have fewer. `count`: positions of all cells. */
export const pooledRange = (cell: number, scale: number, count: number): string => {
  const [first, last] = [cell * scale, Math.min((cell + 1) * scale, count) - 1];
  return first === last ? `${first}` : `${first} to ${last}`;
};
