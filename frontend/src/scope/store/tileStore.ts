/** Cache of the newest attention tiles; concurrent requests for a tile share one fetch. */
import { MOST_TILES, type HeadMap, type ScopeClient, type Tile, type TileAt } from "../client";

export const TILE = 256;
const KEPT_TILES = 128;

/** Cells of an attention map, queries by keys; ends are not included. */
export interface CellRange {
  readonly queryFrom: number;
  readonly queryTo: number;
  readonly keyFrom: number;
  readonly keyTo: number;
}

/** A sequence that has grown since has new tiles. */
const keyOf = (map: HeadMap, { query, key }: TileAt, length: number): string =>
  `${map.run}/${map.sample}/${map.layer}/${map.head}/${map.level}/${query}/${key}@${length}`;

/** The level at which `cells` fit into `pixels`, one texel for each 2^level of them. */
export const levelFor = (cells: number, pixels: number): number =>
  Math.max(0, Math.ceil(Math.log2(Math.max(1, cells) / Math.max(1, pixels))));

/** Tiles below the diagonal that cover `range` at a level. */
export function tilesOver(range: CellRange, level: number): TileAt[] {
  const size = TILE * 2 ** level;
  const found: TileAt[] = [];
  for (let query = Math.floor(range.queryFrom / size); query * size < range.queryTo; query += 1) {
    for (let key = Math.floor(range.keyFrom / size); key * size < range.keyTo && key <= query; key += 1)
      found.push({ query, key });
  }
  return found;
}

export interface PlacedTile extends TileAt {
  readonly tile: Tile;
}

export class TileStore {
  private readonly tiles = new Map<string, Tile>();
  private readonly pending = new Map<string, Promise<Tile>>();

  constructor(private readonly client: Pick<ScopeClient, "tiles">) {}

  /** Tiles of a sequence of `length`; those that are neither cached nor pending are requested together. */
  get(map: HeadMap, at: readonly TileAt[], length: number): Promise<PlacedTile[]> {
    const absent = at.filter((place) => this.known(keyOf(map, place, length)) === undefined);
    for (let from = 0; from < absent.length; from += MOST_TILES)
      this.request(map, absent.slice(from, from + MOST_TILES), length);
    return Promise.all(
      at.map(async (place) => ({ ...place, tile: (await this.known(keyOf(map, place, length))) as Tile })),
    );
  }

  private known(key: string): Tile | Promise<Tile> | undefined {
    return this.tiles.get(key) ?? this.pending.get(key);
  }

  private request(map: HeadMap, at: readonly TileAt[], length: number): void {
    const answer = this.client.tiles(map, at);
    at.forEach((place, index) => {
      const key = keyOf(map, place, length);
      const promise = answer
        .then((tiles) => this.keep(key, tiles[index] as Tile))
        .finally(() => this.pending.delete(key));
      this.pending.set(key, promise);
    });
  }

  private keep(key: string, tile: Tile): Tile {
    this.tiles.set(key, tile);
    const [oldest] = this.tiles.keys();
    if (this.tiles.size > KEPT_TILES && oldest !== undefined) this.tiles.delete(oldest);
    return tile;
  }
}
