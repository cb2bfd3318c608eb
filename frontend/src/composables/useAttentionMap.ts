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
  /** `again`: the page asks once more when the answer said. */
  | { readonly kind: "error"; readonly error: ApiError; readonly again: boolean };

/** While a text grows, tiles of a head that is not pinned are asked for at most this often. */
const FOLLOW_MS = 1000;
const WAIT_MS = 60;
/** So often the page asks again by itself where an answer says when. */
const MOST_REFUSALS = 5;

const sameHead = (a: MapTarget | null, b: MapTarget): boolean =>
  a !== null && a.run === b.run && a.sample === b.sample && a.layer === b.layer && a.head === b.head;
const sameWindow = (a: CellRange, b: CellRange): boolean =>
  a.queryFrom === b.queryFrom && a.keyFrom === b.keyFrom && a.queryTo <= b.queryTo && a.keyTo <= b.keyTo;

/** Tokens may come faster than tiles do: what was asked for a shorter text is waited for. */
const isOnItsWay = (asked: MapTarget | null, now: MapTarget): boolean =>
  asked !== null && sameHead(asked, now) && sameWindow(asked.range, now.range);

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
  let [shown, asked]: [MapTarget | null, MapTarget | null] = [null, null];
  let [known, refused] = [0, 0];
  let [timer, turn, last]: [ReturnType<typeof setTimeout> | undefined, number, number] = [undefined, 0, 0];

  async function load(now: MapTarget): Promise<void> {
    const mine = (turn += 1);
    last = Date.now();
    asked = now;
    try {
      const { level, found } = await fetchTiles(tiles, now);
      if (mine !== turn) return;
      place.value = layTiles(cells, now.range, level, found);
      [shown, known, asked] = [now, now.length, null];
      [state.value, refused] = [{ kind: "ready" }, 0];
      painted.value += 1;
      follow(target());
    } catch (error) {
      if (mine === turn && !isAbort(error)) refuse(asApiError(error));
    }
  }
  /** Who said when to come again is asked again then. */
  function refuse(error: ApiError): void {
    const comesAgain = error.retryAfterS !== null && refused < MOST_REFUSALS;
    [state.value, asked] = [{ kind: "error", error, again: comesAgain }, null];
    if (comesAgain) timer = setTimeout(() => ask(refused + 1), (error.retryAfterS ?? 0) * 1000);
  }
  function follow(now: MapTarget | null): void {
    if (!now || now.length === 0 || isOnItsWay(asked, now)) return;
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
  function ask(times: number): void {
    [state.value, shown, refused] = [{ kind: "loading" }, null, times];
    follow(target());
  }
  const again = (): void => ask(0);
  watch(target, follow, { immediate: true });
  onBeforeUnmount(() => {
    clearTimeout(timer);
    turn += 1;
  });
  return { cells, state, place, painted, again };
}
