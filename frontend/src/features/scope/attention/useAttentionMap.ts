/** Attention of one head in the window that is shown: tiles from the hub, and the live rows of a pinned head. */
import { onScopeDispose, ref, shallowRef, watch, type ShallowRef } from "vue";
import { asApiError, isAbort, type ApiError } from "../../../api/client";
import { Cells } from "../../../render/cells";
import { addRow, layTiles, type MapPlace } from "../../../scope/views/mapCells";
import type { Head } from "../../../scope/protocol";
import type { SampleStore } from "../../../scope/store/sampleStore";
import { levelFor, tilesOver, type CellRange, type TileStore } from "../../../scope/store/tileStore";

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
  /** `again`: the page repeats the request by itself. */
  | { readonly kind: "error"; readonly error: ApiError; readonly again: boolean };

type Timer = ReturnType<typeof setTimeout> | undefined;

/** While a text grows, tiles of a head that is not pinned are requested at most this often. */
const FOLLOW_MS = 1000;
const WAIT_MS = 60;
/** How long the picture of the previous head stays, under its name, before a loading message replaces it. */
const PATIENCE_MS = 150;
/** How often the page repeats a request by itself. */
const MOST_REFUSALS = 5;

const sameText = (a: MapTarget | null, b: MapTarget): a is MapTarget =>
  a !== null && a.run === b.run && a.sample === b.sample;
const sameHead = (a: MapTarget | null, b: MapTarget): boolean =>
  sameText(a, b) && a.layer === b.layer && a.head === b.head;
const sameWindow = (a: CellRange, b: CellRange): boolean =>
  a.queryFrom === b.queryFrom && a.keyFrom === b.keyFrom && a.queryTo <= b.queryTo && a.keyTo <= b.keyTo;

/** Tokens may arrive faster than tiles: a request for a shorter text is waited for. */
const isPending = (requested: MapTarget | null, now: MapTarget): boolean =>
  requested !== null && sameHead(requested, now) && sameWindow(requested.range, now.range);

/** All tiles that a target needs, at the level at which a cell is a pixel or more. */
async function fetchTiles(tiles: TileStore, { run, sample, layer, head, range, pixels, length }: MapTarget) {
  const size = Math.max(range.queryTo - range.queryFrom, range.keyTo - range.keyFrom);
  const level = levelFor(size, pixels);
  const found = await tiles.get({ run, sample, layer, head, level }, tilesOver(range, level), length);
  return { level, found };
}

/** Add the rows since `from` that have arrived and fit; returns the position after them. */
function addRows(cells: Cells, place: MapPlace, target: MapTarget, from: number): number {
  let position = from;
  for (; position < target.length; position += 1) {
    const keys = target.store.attentionRow(target.layer, target.head, position);
    if (!keys || !addRow(cells, place, position, keys)) break;
  }
  return position;
}

class AttentionMap {
  readonly cells = new Cells();
  readonly state: ShallowRef<MapState> = shallowRef({ kind: "loading" });
  /** The head that `state` and `cells` are of. */
  readonly subject: ShallowRef<Head | null> = shallowRef(null);
  readonly place = shallowRef<MapPlace>({ level: 0, queryFrom: 0, keyFrom: 0 });
  readonly painted = ref(0);
  private shown: MapTarget | null = null;
  private requested: MapTarget | null = null;
  /** Positions whose rows are in `cells`: a change shows in `painted`. */
  known = 0;
  /** How often a request was refused and repeated. */
  private refused = 0;
  private request = 0;
  private last = 0;
  private timer: Timer;
  private patience: Timer;

  constructor(
    private readonly tiles: TileStore,
    private readonly target: () => MapTarget | null,
  ) {}

  readonly again = (): void => this.restart(0);

  readonly follow = (now: MapTarget | null): void => {
    if (!now || now.length === 0 || isPending(this.requested, now)) return;
    const same = sameHead(this.shown, now);
    if (same && this.isElsewhere(now)) this.stay(now);
    const grows = same && this.grown(now);
    if (grows && this.known >= now.length) return;
    clearTimeout(this.timer);
    if (!same) return this.change(now);
    const wait = grows ? Math.max(WAIT_MS, this.last + FOLLOW_MS - Date.now()) : WAIT_MS;
    this.timer = setTimeout(() => void this.load(this.target() ?? now), wait);
  };

  stop(): void {
    clearTimeout(this.timer);
    clearTimeout(this.patience);
    this.request += 1;
  }

  private async load(now: MapTarget): Promise<void> {
    const mine = (this.request += 1);
    this.last = Date.now();
    this.requested = now;
    try {
      const { level, found } = await fetchTiles(this.tiles, now);
      if (mine !== this.request) return;
      this.place.value = layTiles(this.cells, now.range, level, found);
      [this.shown, this.known, this.requested, this.refused] = [now, now.length, null, 0];
      this.publish({ kind: "ready" }, now);
      this.painted.value += 1;
      this.follow(this.target());
    } catch (error) {
      if (mine === this.request && !isAbort(error)) this.refuse(asApiError(error), now);
    }
  }

  private publish(to: MapState, of: MapTarget): void {
    clearTimeout(this.patience);
    [this.state.value, this.subject.value] = [to, of];
  }

  /** Repeat the request when the answer says when. */
  private refuse(error: ApiError, of: MapTarget): void {
    const retries = error.retryAfterS !== null && this.refused < MOST_REFUSALS;
    this.requested = null;
    this.publish({ kind: "error", error, again: retries }, of);
    if (retries)
      this.timer = setTimeout(() => this.restart(this.refused + 1), (error.retryAfterS ?? 0) * 1000);
  }

  /** Change to another head; most arrive so soon that clearing the picture first would be wasted. */
  private change(to: MapTarget): void {
    const wait = (): void => this.publish({ kind: "loading" }, this.target() ?? to);
    clearTimeout(this.patience);
    const stays = this.state.value.kind === "ready" && sameText(this.shown, to);
    if (stays) this.patience = setTimeout(wait, PATIENCE_MS);
    else wait();
    void this.load(to);
  }

  /** Whether another head was requested or announced since the picture arrived. */
  private isElsewhere(now: MapTarget): boolean {
    const subject = this.subject.value;
    const isSubject = subject?.layer === now.layer && subject.head === now.head;
    return !isSubject || (this.requested !== null && !sameHead(this.requested, now));
  }

  /** Return to the head whose picture is still here: drop the request for another head. */
  private stay(at: MapTarget): void {
    clearTimeout(this.timer);
    [this.requested, this.request] = [null, this.request + 1];
    this.publish({ kind: "ready" }, at);
  }

  /** Whether only the text became longer; its new rows are added as far as they are here. */
  private grown(now: MapTarget): boolean {
    const { shown } = this;
    if (!shown || !sameWindow(shown.range, now.range) || shown.pixels !== now.pixels) return false;
    const before = this.known;
    this.known = addRows(this.cells, this.place.value, now, before);
    if (this.known > before) this.painted.value += 1;
    return true;
  }

  private restart(times: number): void {
    [this.state.value, this.shown, this.refused] = [{ kind: "loading" }, null, times];
    this.follow(this.target());
  }
}

export function useAttentionMap(tiles: TileStore, target: () => MapTarget | null): AttentionMap {
  const map = new AttentionMap(tiles, target);
  watch(target, map.follow, { immediate: true });
  onScopeDispose(() => map.stop());
  return map;
}
