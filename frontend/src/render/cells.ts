/** A matrix of codes 0 .. 255 that a heat map shows: changes are recorded, so that only they are painted again. */

export const Mask = { VALUE: 0, MISSING: 1, NAN: 2 } as const;

/** Cells from (column, row) on. */
export interface Region {
  readonly column: number;
  readonly row: number;
  readonly columns: number;
  readonly rows: number;
}

export class Cells {
  columns = 0;
  rows = 0;
  values = new Uint8Array();
  mask = new Uint8Array();
  /** Changes with every write. */
  version = 0;
  private dirty: Region | null = null;

  constructor(columns = 0, rows = 0) {
    this.resize(columns, rows);
  }

  /** Change the size: all cells become missing. */
  resize(columns: number, rows: number): void {
    if (columns !== this.columns || rows !== this.rows) {
      [this.columns, this.rows] = [columns, rows];
      this.values = new Uint8Array(columns * rows);
      this.mask = new Uint8Array(columns * rows);
    }
    this.mask.fill(Mask.MISSING);
    this.touch({ column: 0, row: 0, columns, rows });
  }

  set(column: number, row: number, value: number, mask: number = Mask.VALUE): void {
    const at = row * this.columns + column;
    this.values[at] = value;
    this.mask[at] = mask;
    this.touch({ column, row, columns: 1, rows: 1 });
  }

  /** A block of values, row by row; what lies outside is left out. */
  write(region: Region, values: Uint8Array, mask?: Uint8Array): void {
    const width = Math.min(region.columns, this.columns - region.column);
    for (let row = 0; row < region.rows && region.row + row < this.rows; row += 1) {
      const [from, to] = [row * region.columns, (region.row + row) * this.columns + region.column];
      this.values.set(values.subarray(from, from + width), to);
      if (mask) this.mask.set(mask.subarray(from, from + width), to);
      else this.mask.fill(Mask.VALUE, to, to + width);
    }
    this.touch(region);
  }

  /** The same value in a block, which must lie within. */
  fill({ column, row, columns, rows }: Region, value: number): void {
    for (let at = row * this.columns + column; at < (row + rows) * this.columns; at += this.columns) {
      this.values.fill(value, at, at + columns);
      this.mask.fill(Mask.VALUE, at, at + columns);
    }
    this.touch({ column, row, columns, rows });
  }

  /** What changed since the last call. */
  takeDirty(): Region | null {
    const { dirty } = this;
    this.dirty = null;
    return dirty;
  }

  /** Whether the cell has a number. */
  has(column: number, row: number): boolean {
    return this.mask[row * this.columns + column] === Mask.VALUE;
  }

  at(column: number, row: number): number {
    return this.values[row * this.columns + column] ?? 0;
  }

  count(kind: number): number {
    return this.mask.reduce((sum, mask) => sum + (mask === kind ? 1 : 0), 0);
  }

  private touch(region: Region): void {
    this.version += 1;
    this.dirty = this.dirty ? union(this.dirty, region) : region;
  }
}

function union(a: Region, b: Region): Region {
  const [column, row] = [Math.min(a.column, b.column), Math.min(a.row, b.row)];
  return {
    column,
    row,
    columns: Math.max(a.column + a.columns, b.column + b.columns) - column,
    rows: Math.max(a.row + a.rows, b.row + b.rows) - row,
  };
}
