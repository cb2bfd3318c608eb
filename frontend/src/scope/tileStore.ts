/** Tiles of attention that were fetched, the newest so many; each is asked for once at a time. */
import type { ScopeClient, Tile, TilePlace } from "./client";

export const TILE = 256;
const KEPT_TILES = 128;

/** Cells of an attention map, queries by keys; ends are not included. */
export interface CellRange {
  readonly queryFrom: number;
  readonly queryTo: number;
  readonly keyFrom: number;
  readonly keyTo: number;
}

const keyOf = (place: TilePlace, length: number): string =>
  `${place.run}/${place.sample}/${place.layer}/${place.head}/${place.level}/${place.query}/${place.key}@${length}`;

/** The level at which `cells` fit into `pixels`, one texel for each 2^level of them. */
export const levelFor = (cells: number, pixels: number): number =>
  Math.max(0, Math.ceil(Math.log2(Math.max(1, cells) / Math.max(1, pixels))));

/** Tiles below the diagonal that cover `range` at a level. */
export function tilesOver(range: CellRange, level: number): { query: number; key: number }[] {
  const size = TILE * 2 ** level;
  const found: { query: number; key: number }[] = [];
  for (let query = Math.floor(range.queryFrom / size); query * size < range.queryTo; query += 1) {
    for (let key = Math.floor(range.keyFrom / size); key * size < range.keyTo && key <= query; key += 1)
      found.push({ query, key });
  }
  return found;
}

export class TileStore {
  private readonly kept = new Map<string, Tile>();
  private readonly asked = new Map<string, Promise<Tile>>();

  constructor(private readonly client: Pick<ScopeClient, "tile">) {}

  /** What is here already; a sequence that has grown since has new tiles. */
  peek(place: TilePlace, length: number): Tile | undefined {
    return this.kept.get(keyOf(place, length));
  }

  get(place: TilePlace, length: number): Promise<Tile> {
    const key = keyOf(place, length);
    const known = this.kept.get(key);
    if (known) return Promise.resolve(known);
    const pending = this.asked.get(key);
    if (pending) return pending;
    const promise = this.client
      .tile(place)
      .then((tile) => this.keep(key, tile))
      .finally(() => this.asked.delete(key));
    this.asked.set(key, promise);
    return promise;
  }

  private keep(key: string, tile: Tile): Tile {
    this.kept.set(key, tile);
    const [oldest] = this.kept.keys();
    if (this.kept.size > KEPT_TILES && oldest !== undefined) this.kept.delete(oldest);
    return tile;
  }
}
