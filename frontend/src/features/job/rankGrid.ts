/** Ranks as small squares, a block for each stage: where they are in a picture of some width. Pure. */
import type { RankView } from "../../api/types";
import { roleNamed } from "../../trace/kinds";

/** Height of the blocks that a picture has at most, if its squares can be made small enough. */
const MOST_HEIGHT = 460;
const SIZES = [14, 10, 8, 6, 5, 4, 3, 2] as const;
/** Line of text above a block. */
export const TITLE = 16;

export interface Block {
  readonly title: string;
  readonly ranks: readonly RankView[];
  /** First row of squares, and the pixel above them. */
  readonly row: number;
  readonly y: number;
}

export interface RankGrid {
  readonly blocks: readonly Block[];
  readonly columns: number;
  readonly size: number;
  readonly rows: number;
  readonly height: number;
}

/** Ranks by role and stage, those of a stage in their order. */
export function stagesOf(ranks: readonly RankView[]): [string, RankView[]][] {
  const byRole = (rank: RankView): number => (rank.role === "backward" ? 1 : 0);
  const stages = new Map<string, RankView[]>();
  for (const rank of [...ranks].sort((left, right) => byRole(left) - byRole(right) || left.pp - right.pp)) {
    const name = `Stage ${rank.pp}${roleNamed(rank.role) ? `, ${rank.role}` : ""}`;
    const members = stages.get(name);
    if (members) members.push(rank);
    else stages.set(name, [rank]);
  }
  return [...stages];
}

export function gridOf(ranks: readonly RankView[], width: number): RankGrid {
  const stages = stagesOf(ranks);
  const rowsAt = (size: number): number =>
    stages.reduce(
      (rows, [, members]) => rows + Math.ceil((members.length * size) / Math.max(width, size)),
      0,
    );
  const size =
    SIZES.find((size) => rowsAt(size) * size + stages.length * TITLE <= MOST_HEIGHT) ??
    SIZES[SIZES.length - 1] ??
    2;
  const columns = Math.max(1, Math.floor(width / size));
  const blocks: Block[] = [];
  let [row, y] = [0, 0];
  for (const [title, members] of stages) {
    blocks.push({ title, ranks: members, row, y: y + TITLE });
    const rows = Math.ceil(members.length / columns);
    row += rows;
    y += TITLE + rows * size;
  }
  return { blocks, columns, size, rows: row, height: y };
}

export interface Place {
  readonly row: number;
  readonly column: number;
}

/** The rank at a row and column of squares. */
export function rankAt({ blocks, columns }: RankGrid, { row, column }: Place): RankView | undefined {
  const block = blocks.findLast((candidate) => candidate.row <= row);
  return block && column < columns ? block.ranks[(row - block.row) * columns + column] : undefined;
}

/** The square under a pixel. */
export function placeUnder({ blocks, size, columns }: RankGrid, x: number, y: number): Place | null {
  const block = blocks.findLast((candidate) => candidate.y <= y);
  const column = Math.floor(x / size);
  if (!block || column < 0 || column >= columns) return null;
  const row = Math.floor((y - block.y) / size);
  return row * columns + column < block.ranks.length ? { row: block.row + row, column } : null;
}

export function placeOfRank({ blocks, columns }: RankGrid, rank: number | null): Place | null {
  for (const block of blocks) {
    const at = block.ranks.findIndex((member) => member.rank === rank);
    if (at >= 0) return { row: block.row + Math.floor(at / columns), column: at % columns };
  }
  return null;
}
