/** The matrix behind a large attention map: tiles put side by side, and live rows added where they belong. */
import { Mask, type Cells } from "../../render/cells";
import { TILE, type CellRange, type PlacedTile } from "../store/tileStore";

/** Cell (0, 0) is query `queryFrom` and key `keyFrom`; each cell covers 2^level of both. */
export interface MapPlace {
  readonly level: number;
  readonly queryFrom: number;
  readonly keyFrom: number;
}

const SMALLEST = 64;

/** Capacity grows by doubling, so that a growing text does not reallocate with every token. */
const capacity = (cells: number): number => 2 ** Math.ceil(Math.log2(Math.max(SMALLEST, cells)));

/** Lay out the tiles that cover a range; the matrix begins at a border of tiles. */
export function layTiles(
  cells: Cells,
  range: CellRange,
  level: number,
  tiles: readonly PlacedTile[],
): MapPlace {
  const scale = 2 ** level;
  const size = TILE * scale;
  const queryFrom = Math.floor(range.queryFrom / size) * size;
  const keyFrom = Math.floor(range.keyFrom / size) * size;
  const most = Math.max(range.queryTo - queryFrom, range.keyTo - keyFrom) / scale;
  cells.resize(capacity(most), capacity(most));
  for (const { query, key, tile } of tiles) {
    const [column, row] = [key * TILE - keyFrom / scale, query * TILE - queryFrom / scale];
    cells.write({ column, row, columns: tile.columns, rows: tile.rows }, tile.values);
  }
  const place = { level, queryFrom, keyFrom };
  clearAbove(cells, place);
  return place;
}

/** Queries do not attend to later keys: those cells are 0, not missing. */
function clearAbove(cells: Cells, { level, queryFrom, keyFrom }: MapPlace): void {
  const scale = 2 ** level;
  for (let row = 0; row < cells.rows; row += 1) {
    const column = Math.max(0, Math.floor((queryFrom + (row + 1) * scale - 1 - keyFrom) / scale) + 1);
    const columns = cells.columns - column;
    if (columns > 0) cells.fill({ column, row, columns, rows: 1 }, 0);
  }
}

/** Adds the row of a query; of several that share a cell the largest stays. Returns whether it fits. */
export function addRow(cells: Cells, place: MapPlace, query: number, keys: Uint8Array): boolean {
  const scale = 2 ** place.level;
  const row = Math.floor((query - place.queryFrom) / scale);
  if (row < 0 || row >= cells.rows || (keys.length - place.keyFrom) / scale > cells.columns) return false;
  const columns = Math.ceil((keys.length - place.keyFrom) / scale);
  if (columns <= 0) return true;
  const values = new Uint8Array(columns);
  for (let column = 0; column < columns; column += 1)
    values[column] = cells.has(column, row) ? cells.at(column, row) : 0;
  for (let key = Math.max(0, place.keyFrom); key < keys.length; key += 1) {
    const column = Math.floor((key - place.keyFrom) / scale);
    values[column] = Math.max(values[column] ?? 0, keys[key] ?? 0);
  }
  cells.write({ column: 0, row, columns, rows: 1 }, values);
  return true;
}

/** Code of a query and key; undefined where none is, or above the diagonal. */
export function codeAt(cells: Cells, place: MapPlace, query: number, key: number): number | undefined {
  const scale = 2 ** place.level;
  const [row, column] = [
    Math.floor((query - place.queryFrom) / scale),
    Math.floor((key - place.keyFrom) / scale),
  ];
  if (key > query || row < 0 || column < 0 || row >= cells.rows || column >= cells.columns) return undefined;
  return cells.mask[row * cells.columns + column] === Mask.VALUE ? cells.at(column, row) : undefined;
}
