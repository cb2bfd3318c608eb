/** Cell cursor and pointer of a picture of cells: arrow keys move the cursor, and screen readers announce the cell. */
import { computed, ref, useTemplateRef } from "vue";

export interface Cell {
  readonly row: number;
  readonly column: number;
}

/** The pointer in CSS pixels, in a picture of this width. */
export interface PointerPosition {
  readonly x: number;
  readonly y: number;
  readonly width: number;
}

interface Options {
  /** The cell from which arrows move. */
  readonly cursor: () => Cell;
  readonly limits: () => { readonly first: Cell; readonly last: Cell };
  /** Cells that an arrow moves with shift. */
  readonly stride: number;
  /** The cell in words; null: it has none. */
  readonly describe: (cell: Cell) => string | null;
  readonly onMove: (cell: Cell) => void;
}

const MOVES: Readonly<Record<string, Cell>> = {
  ArrowLeft: { row: 0, column: -1 },
  ArrowRight: { row: 0, column: 1 },
  ArrowUp: { row: -1, column: 0 },
  ArrowDown: { row: 1, column: 0 },
  Home: { row: 0, column: Number.NEGATIVE_INFINITY },
  End: { row: 0, column: Number.POSITIVE_INFINITY },
};

const bound = (value: number, first: number, last: number): number =>
  Math.min(Math.max(first, value), Math.max(first, last));

/** The picture has the template ref `sheet`. */
export function useCellCursor({ cursor, limits, stride, describe, onMove }: Options) {
  const sheet = useTemplateRef<{ readonly width: number }>("sheet");
  const width = computed(() => sheet.value?.width ?? 0);
  const spoken = ref("");
  const announce = (cell: Cell): void => void (spoken.value = describe(cell) ?? spoken.value);
  /** Returns whether the key moved the cursor. */
  function onArrow(event: KeyboardEvent): boolean {
    const move = event.ctrlKey || event.metaKey || event.altKey ? undefined : MOVES[event.key];
    if (!move) return false;
    event.preventDefault();
    const by = event.shiftKey ? stride : 1;
    const [from, { first, last }] = [cursor(), limits()];
    const cell = {
      row: bound(from.row + move.row * by, first.row, last.row),
      column: bound(from.column + move.column * by, first.column, last.column),
    };
    announce(cell);
    onMove(cell);
    return true;
  }
  const pointer = ({ offsetX: x, offsetY: y }: MouseEvent): PointerPosition => ({ x, y, width: width.value });
  return { width, spoken, announce, onArrow, pointer };
}
