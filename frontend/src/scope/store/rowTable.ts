/** Rows of one tensor by position, in chunks: rows may arrive in any order, and the oldest chunks can be dropped. */
import { emptyRaw, type Code, type Raw } from "../tensors/tensors";

export const CHUNK_ROWS = 64;

interface Chunk {
  readonly data: Raw;
  readonly scales: Float32Array | null;
  readonly present: Uint8Array;
}

export interface Row {
  readonly data: Raw;
  readonly scales: Float32Array | null;
}

export class RowTable {
  private readonly chunks = new Map<number, Chunk>();

  constructor(
    readonly code: Code,
    /** Numbers of a row. */
    readonly width: number,
    /** Scales of a row, for `i8`. */
    readonly scaled: number,
  ) {}

  get bytes(): number {
    const each = this.width * emptyRaw(this.code, 0).BYTES_PER_ELEMENT + this.scaled * 4 + 1;
    return this.chunks.size * CHUNK_ROWS * each;
  }

  set(position: number, data: Raw, scales: Float32Array | null): void {
    const [chunk, at] = this.place(position);
    chunk.data.set(data as never, at * this.width);
    if (scales) chunk.scales?.set(scales, at * this.scaled);
    chunk.present[at] = 1;
  }

  /** Views on the numbers of a position; undefined where none were sent, or they were dropped. */
  get(position: number): Row | undefined {
    const chunk = this.chunks.get(Math.floor(position / CHUNK_ROWS));
    const at = position % CHUNK_ROWS;
    if (!chunk?.present[at]) return undefined;
    return {
      data: chunk.data.subarray(at * this.width, (at + 1) * this.width),
      scales: chunk.scales?.subarray(at * this.scaled, (at + 1) * this.scaled) ?? null,
    };
  }

  has(position: number): boolean {
    return this.chunks.get(Math.floor(position / CHUNK_ROWS))?.present[position % CHUNK_ROWS] === 1;
  }

  /** Drops the chunk of the lowest positions; the newest stays. Returns whether there was one. */
  dropOldest(): boolean {
    if (this.chunks.size < 2) return false;
    return this.chunks.delete(Math.min(...this.chunks.keys()));
  }

  private place(position: number): [Chunk, number] {
    const index = Math.floor(position / CHUNK_ROWS);
    let chunk = this.chunks.get(index);
    if (!chunk) {
      chunk = {
        data: emptyRaw(this.code, CHUNK_ROWS * this.width),
        scales: this.scaled > 0 ? new Float32Array(CHUNK_ROWS * this.scaled) : null,
        present: new Uint8Array(CHUNK_ROWS),
      };
      this.chunks.set(index, chunk);
    }
    return [chunk, position % CHUNK_ROWS];
  }
}
