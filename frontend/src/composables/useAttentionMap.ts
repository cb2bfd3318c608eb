/** Attention of one head in the window that is shown: tiles from the hub, and the live rows of a pinned head. */
import { onBeforeUnmount, ref, shallowRef, watch, type ShallowRef } from "vue";
import { asApiError, isAbort, type ApiError } from "../api/client";
import { Cells } from "../render/cells";
import { addRow, layTiles, type MapPlace } from "../scope/mapCells";
import type { SampleStore } from "../scope/sampleStore";
import { levelFor, tilesOver, type CellRange, type TileStore } from "../scope/tileStore";

export interface MapTarget {
  readonly run: string;
  readonly sample: number;
  readonly layer: number;
  readonly head: number;
  readonly store: SampleStore;
  /** Positions that the model has read. */
  readonly length: number;
  readonly range: CellRange;
  /** Pixels along a side. */
  readonly pixels: number;
}

export type MapState =
  | { readonly kind: "loading" }
  | { readonly kind: "ready" }
  | { readonly kind: "error"; readonly error: ApiError };

/** While a text grows, tiles of a head that is not pinned are asked for at most this often. */
const FOLLOW_MS = 1000;
const WAIT_MS = 60;

const sameHead = (a: MapTarget | null, b: MapTarget): boolean =>
  a !== null && a.run === b.run && a.sample === b.sample && a.layer === b.layer && a.head === b.head;
const sameWindow = (a: CellRange, b: CellRange): boolean =>
  a.queryFrom === b.queryFrom && a.keyFrom === b.keyFrom && a.queryTo <= b.queryTo && a.keyTo <= b.keyTo;

/** All tiles that a target needs, at the level at which a cell is a pixel or more. */
async function fetchTiles(tiles: TileStore, { run, sample, layer, head, range, pixels, length }: MapTarget) {
  const size = Math.max(range.queryTo - range.queryFrom, range.keyTo - range.keyFrom);
  const level = levelFor(size, pixels);
  const found = await Promise.all(
    tilesOver(range, level).map(async (at) => ({
      ...at,
      tile: await tiles.get({ run, sample, layer, head, level, ...at }, length),
    })),
  );
  return { level, found };
}

/** Rows that came since `from`, as far as they are here and have room; the position that comes next. */
function addRows(cells: Cells, place: MapPlace, target: MapTarget, from: number): number {
  let position = from;
  for (; position < target.length; position += 1) {
    const keys = target.store.attentionRow(target.layer, target.head, position);
    if (!keys || !addRow(cells, place, position, keys)) break;
  }
  return position;
}

export function useAttentionMap(tiles: TileStore, target: () => MapTarget | null) {
  const cells = new Cells();
  const state: ShallowRef<MapState> = shallowRef({ kind: "loading" });
  const place = shallowRef<MapPlace>({ level: 0, queryFrom: 0, keyFrom: 0 });
  const painted = ref(0);
  let shown: MapTarget | null = null;
  let known = 0;
  let [timer, turn, last]: [ReturnType<typeof setTimeout> | undefined, number, number] = [undefined, 0, 0];

  async function load(now: MapTarget): Promise<void> {
    const mine = (turn += 1);
    last = Date.now();
    try {
      const { level, found } = await fetchTiles(tiles, now);
      if (mine !== turn) return;
      place.value = layTiles(cells, now.range, level, found);
      [shown, known] = [now, now.length];
      state.value = { kind: "ready" };
      painted.value += 1;
    } catch (error) {
      if (mine === turn && !isAbort(error)) state.value = { kind: "error", error: asApiError(error) };
    }
  }
  function follow(now: MapTarget | null): void {
    if (!now || now.length === 0) return;
    const same = sameHead(shown, now);
    const grows = same && grown(now);
    if (grows && known >= now.length) return;
    if (!same) state.value = { kind: "loading" };
    clearTimeout(timer);
    const wait = grows ? Math.max(WAIT_MS, last + FOLLOW_MS - Date.now()) : WAIT_MS;
    timer = setTimeout(() => void load(target() ?? now), same ? wait : 0);
  }
  /** Whether only the text became longer; its new rows are added as far as they are here. */
  function grown(now: MapTarget): boolean {
    if (!shown || !sameWindow(shown.range, now.range) || shown.pixels !== now.pixels) return false;
    const before = known;
    known = addRows(cells, place.value, now, known);
    if (known > before) painted.value += 1;
    return true;
  }
  const again = (): void => {
    [state.value, shown] = [{ kind: "loading" }, null];
    follow(target());
  };
  watch(target, follow, { immediate: true });
  onBeforeUnmount(() => {
    clearTimeout(timer);
    turn += 1;
  });
  return { cells, state, place, painted, again };
}
