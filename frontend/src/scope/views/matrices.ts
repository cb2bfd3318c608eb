/** Matrices of codes from what the store holds: layers by tokens, strips of one token, heads of one token. */
import { Mask, type Cells } from "../../render/cells";
import { decodeNumbers, type NumberCode } from "../tensors/codes";
import type { SampleStore } from "../store/sampleStore";

/** A colour domain, and how many numbers lie outside. */
export interface Domain {
  readonly low: number;
  readonly high: number;
  readonly clipped: number;
  readonly nans: number;
}

const QUANTILE = 0.95;

/** How many finite numbers a domain leaves out, and how many are none. */
const beyond = (values: readonly number[], { low, high }: Pick<Domain, "low" | "high">) => ({
  clipped: values.filter((value) => Number.isFinite(value) && (value < low || value > high)).length,
  nans: values.filter(Number.isNaN).length,
});

/** The same ends for other numbers: what lies beyond them is counted anew. */
export const fixedDomain = ({ low, high }: Domain, values: readonly number[]): Domain => ({
  low,
  high,
  ...beyond(values, { low, high }),
});

/** Zero, or the lowest, to the 95th percentile: the first token, whose state is often huge, never takes the whole scale. */
export function domainOf(values: readonly number[], signed: boolean): Domain {
  const finite = values.filter(Number.isFinite);
  const sizes = (signed ? finite.map(Math.abs) : finite).toSorted((a, b) => a - b);
  const largest = sizes[Math.floor((sizes.length - 1) * QUANTILE)] ?? 1;
  const high = signed && largest === 0 ? 1 : largest;
  const low = signed ? -high : Math.min(sizes[0] ?? 0, high);
  return {
    low,
    high: high > low ? high : low + Math.max(1, Math.abs(low)),
    ...beyond(values, { low, high }),
  };
}

/** Code of a value within a domain. */
export const codeOf = (value: number, { low, high }: Pick<Domain, "low" | "high">): number =>
  Math.round(255 * Math.min(1, Math.max(0, (value - low) / (high - low))));

function put(cells: Cells, column: number, row: number, value: number, domain: Domain): void {
  if (Number.isNaN(value)) cells.set(column, row, 0, Mask.NAN);
  else cells.set(column, row, codeOf(value, domain));
}

/**
 * Position whose numbers can be shown in the place of `position`: its own, or in a long prompt, of which only every
 * stride-th token has numbers, the last one before it. null: there is none. A panel that shows another position must name it.
 */
export function shownFor(sample: SampleStore, name: string, position: number): number | null {
  const table = sample.tableOf(name);
  if (table?.has(position)) return position;
  const before = position - (position % sample.stride);
  return position < sample.promptLength && table?.has(before) ? before : null;
}

/** Numbers of a tensor at a position, never those of another; undefined where none were sent. */
export function numbersAt(sample: SampleStore, name: string, position: number): Float32Array | undefined {
  const table = sample.tableOf(name);
  const row = table?.get(position);
  return row && table ? decodeNumbers(table.code as NumberCode, row.data, row.scales) : undefined;
}

/** All numbers of a quantity that are here. */
export function layerValues(sample: SampleStore, name: string, length: number): number[] {
  const found: number[] = [];
  for (let position = 0; position < length; position += 1) {
    if (sample.tableOf(name)?.has(position)) found.push(...(numbersAt(sample, name, position) ?? []));
  }
  return found;
}

/**
 * Columns `from` to before `end` of layers by tokens; what was never sent stays missing. In a long prompt a token's cell
 * reaches to the next one that has numbers.
 */
export function fillLayers(
  cells: Cells,
  sample: SampleStore,
  name: string,
  domain: Domain,
  from: number,
  end: number,
): void {
  for (let position = from; position < Math.min(end, cells.columns); position += 1) {
    const shown = shownFor(sample, name, position);
    if (shown === null) continue;
    numbersAt(sample, name, shown)?.forEach((value, layer) => put(cells, position, layer, value, domain));
  }
}

export interface Strip {
  readonly pixels: number;
  readonly layers: number;
  readonly values: Float32Array;
}

/** Pixels of a state at a position, [layers][pixels]; undefined where none were sent. */
export function stripOf(
  sample: SampleStore,
  name: string,
  position: number,
  layers: number,
): Strip | undefined {
  const values = numbersAt(sample, name, position);
  if (!values) return undefined;
  return { pixels: Math.floor(values.length / Math.max(1, layers)), layers, values };
}

/** A strip as codes; `domainAt` may differ by layer, to compare shapes rather than sizes. */
export function fillStrip(cells: Cells, strip: Strip, domainAt: (layer: number) => Domain): void {
  cells.resize(strip.pixels, strip.layers);
  for (let layer = 0; layer < strip.layers; layer += 1) {
    const domain = domainAt(layer);
    for (let pixel = 0; pixel < strip.pixels; pixel += 1)
      put(cells, pixel, layer, strip.values[layer * strip.pixels + pixel] ?? Number.NaN, domain);
  }
}

/** A statistic [layers, heads] of one token, layers by heads. */
export function fillHeads(
  cells: Cells,
  sample: SampleStore,
  name: string,
  position: number,
  model: { readonly layers: number; readonly heads: number },
): void {
  cells.resize(model.heads, model.layers);
  const row = sample.row(name, position);
  if (!row) return;
  cells.write({ column: 0, row: 0, columns: model.heads, rows: model.layers }, new Uint8Array(row.data));
}

/** Cells along the edge of a head's picture: a prompt of fewer tokens than the atlas has cells fills only as many. */
export const atlasEdge = ({ atlas, promptLength }: SampleStore): number =>
  Math.max(1, Math.min(atlas?.edge ?? 1, promptLength || Infinity));

/** The small pictures of all heads as one matrix, [layers x edge][heads x edge]; every cell covers tokens. */
export function fillAtlas(cells: Cells, sample: SampleStore): void {
  const { atlas, promptLength } = sample;
  if (!atlas) return cells.resize(0, 0);
  const { layers, heads, edge, values } = atlas;
  const shown = atlasEdge(sample);
  // Cell `at` of the atlas holds the tokens from at * length / edge on: of a short prompt some hold none.
  const places = Array.from({ length: edge }, (_, at) => at).filter(
    (at) =>
      shown === edge || Math.floor(((at + 1) * promptLength) / edge) > Math.floor((at * promptLength) / edge),
  );
  cells.resize(heads * shown, layers * shown);
  for (let index = 0; index < layers * heads; index += 1) {
    const [layer, head] = [Math.floor(index / heads), index % heads];
    const first = index * edge * edge;
    const picture = places.flatMap((row) => places.map((column) => values[first + row * edge + column] ?? 0));
    const place = { column: head * shown, row: layer * shown, columns: shown, rows: shown };
    cells.write(place, Uint8Array.from(picture));
  }
}
