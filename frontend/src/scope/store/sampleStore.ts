/** Tensors of one prompt and of the text generated after it. */
import type { Offset, Prompt } from "../protocol";
import { RowTable, type Row } from "./rowTable";
import type { Tensor } from "../tensors/tensors";

/** Outputs of a row belong to the position after it. */
const OF_NEXT_TOKEN = new Set(["top.id", "top.p", "top.logit", "partition", "surprise", "entropy"]);

export interface Atlas {
  readonly layers: number;
  readonly heads: number;
  /** Edge of a head's picture, in cells. */
  readonly edge: number;
  readonly values: Uint8Array;
}

export class SampleStore {
  readonly ids: number[] = [];
  readonly texts: string[] = [];
  readonly offsets: Offset[] = [];
  promptText = "";
  promptLength = 0;
  finished: string | null = null;
  /** Every how many tokens of the prompt have numbers. */
  stride = 1;
  atlas: Atlas | null = null;
  private readonly tables = new Map<string, RowTable>();
  /** Of a row of each table: its axes. */
  private readonly shapes = new Map<string, readonly number[]>();
  private readonly attention = new Map<string, Map<number, Uint8Array>>();
  private attentionBytes = 0;

  get length(): number {
    return this.ids.length;
  }

  /** Tokens that the model has read: all of a prompt, and all that was generated but the last. */
  get read(): number {
    return this.length > this.promptLength ? this.length - 1 : this.length;
  }

  get bytes(): number {
    return [...this.tables.values()].reduce((sum, table) => sum + table.bytes, this.attentionBytes);
  }

  setPrompt({ text, ids, offsets }: Prompt): void {
    this.promptText = text;
    this.promptLength = ids.length;
    ids.forEach((id, position) => {
      const offset = offsets[position] ?? null;
      this.setToken(position, id, offset ? text.slice(offset[0], offset[1]) : "", offset);
    });
  }

  setToken(position: number, id: number, text: string, offset: Offset): void {
    this.ids[position] = id;
    this.texts[position] = text;
    this.offsets[position] = offset;
  }

  /** Row `index` of a tensor whose first axis is rows; `position` is of the token that was read. */
  setRow(tensor: Tensor, index: number, position: number): void {
    const rows = tensor.shape[0] ?? 0;
    if (index >= rows) return;
    const table = this.table(tensor, rows);
    const at = OF_NEXT_TOKEN.has(tensor.name) ? position + 1 : position;
    const { width, scaled } = table;
    const scales = tensor.scales?.subarray(index * scaled, (index + 1) * scaled) ?? null;
    table.set(at, tensor.data.subarray(index * width, (index + 1) * width), scales);
  }

  row(name: string, position: number): Row | undefined {
    return this.tables.get(name)?.get(position);
  }

  tableNames(): string[] {
    return [...this.tables.keys()].toSorted();
  }

  shapeOf(name: string): readonly number[] {
    return this.shapes.get(name) ?? [];
  }

  /** Drops all tables whose name is chosen. */
  dropTables(chosen: (name: string) => boolean): void {
    for (const name of [...this.tables.keys()].filter(chosen)) this.tables.delete(name);
  }

  tableOf(name: string): RowTable | undefined {
    return this.tables.get(name);
  }

  /** The row of a query of a pinned head: its probabilities over keys, `u8s`. */
  setAttention(layer: number, head: number, position: number, keys: Uint8Array): void {
    const key = `${layer}.${head}`;
    const rows = this.attention.get(key) ?? new Map<number, Uint8Array>();
    this.attentionBytes += keys.length - (rows.get(position)?.length ?? 0);
    this.attention.set(key, rows.set(position, keys.slice()));
  }

  attentionRow(layer: number, head: number, position: number): Uint8Array | undefined {
    return this.attention.get(`${layer}.${head}`)?.get(position);
  }

  /** Drops the oldest numbers (tokens stay); returns whether there were any. */
  dropOldest(): boolean {
    let dropped = false;
    for (const table of this.tables.values()) dropped = table.dropOldest() || dropped;
    for (const rows of this.attention.values()) {
      for (const [position, keys] of [...rows].slice(0, rows.size >> 1)) {
        this.attentionBytes -= keys.length;
        dropped = rows.delete(position) || dropped;
      }
    }
    return dropped;
  }

  private table(tensor: Tensor, rows: number): RowTable {
    const width = rows > 0 ? tensor.data.length / rows : 0;
    const scaled = tensor.scales && rows > 0 ? tensor.scales.length / rows : 0;
    const known = this.tables.get(tensor.name);
    if (known && known.width === width && known.code === tensor.code) return known;
    // Another width: the capture was changed during the run, and old rows no longer fit the new ones.
    const table = new RowTable(tensor.code, width, scaled);
    this.tables.set(tensor.name, table);
    this.shapes.set(tensor.name, tensor.shape.slice(1));
    return table;
  }
}
