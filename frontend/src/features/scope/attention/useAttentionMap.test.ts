import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { effectScope, nextTick, shallowRef, type EffectScope } from "vue";
import { ApiError } from "../../../api/client";
import { codeAt } from "../../../scope/views/mapCells";
import type { HeadMap, Tile } from "../../../scope/client";
import { SampleStore } from "../../../scope/store/sampleStore";
import { TileStore } from "../../../scope/store/tileStore";
import { useAttentionMap, type MapTarget } from "./useAttentionMap";

const LENGTH = 8;
const target = (head: number): MapTarget => ({
  run: "r",
  sample: 0,
  layer: 2,
  head,
  store: new SampleStore(),
  length: LENGTH,
  pixels: 250,
  range: { queryFrom: 0, queryTo: LENGTH, keyFrom: 0, keyTo: LENGTH },
});

/** A hub that answers when it is told to. */
class SlowHub {
  readonly asked: number[] = [];
  private readonly waiting = new Map<number, (tiles: Tile[]) => void>();
  private readonly failing = new Map<number, (error: ApiError) => void>();
  tiles = ({ head }: HeadMap): Promise<Tile[]> => {
    this.asked.push(head);
    return new Promise((resolve, reject) => {
      this.waiting.set(head, resolve);
      this.failing.set(head, reject);
    });
  };
  async refuse(head: number): Promise<void> {
    this.failing.get(head)?.(new ApiError(503, "busy", "Wait.", {}, 2));
    await vi.advanceTimersByTimeAsync(0);
  }
  async answer(head: number): Promise<void> {
    const values = new Uint8Array(LENGTH * LENGTH).fill(head);
    this.waiting.get(head)?.([{ rows: LENGTH, columns: LENGTH, values }]);
    await vi.advanceTimersByTimeAsync(0);
  }
}

describe("another head", () => {
  let scope: EffectScope;
  beforeEach(() => {
    vi.useFakeTimers();
    scope = effectScope();
  });
  afterEach(() => {
    scope.stop();
    vi.useRealTimers();
  });

  async function opened() {
    const hub = new SlowHub();
    const wanted = shallowRef<MapTarget | null>(target(1));
    const map = scope.run(() => useAttentionMap(new TileStore(hub), () => wanted.value));
    if (!map) throw new Error("the scope is over");
    const told = () => ({
      kind: map.state.value.kind,
      head: map.subject.value?.head,
      code: codeAt(map.cells, map.place.value, 3, 3),
    });
    await hub.answer(1);
    const choose = async (head: number): Promise<void> => {
      wanted.value = target(head);
      await nextTick();
    };
    return { hub, told, choose };
  }

  it("is asked for at once; what is there stays under its own name until it comes", async () => {
    const { hub, told, choose } = await opened();
    expect(told()).toEqual({ kind: "ready", head: 1, code: 1 });
    await choose(5);
    expect(hub.asked).toEqual([1, 5]);
    expect(told()).toEqual({ kind: "ready", head: 1, code: 1 });
    await hub.answer(5);
    expect(told()).toEqual({ kind: "ready", head: 5, code: 5 });
  });

  it("says that it is waited for once that takes long", async () => {
    const { hub, told, choose } = await opened();
    await choose(5);
    await vi.advanceTimersByTimeAsync(1000);
    expect(told()).toMatchObject({ kind: "loading", head: 5 });
    await hub.answer(5);
    expect(told()).toEqual({ kind: "ready", head: 5, code: 5 });
  });

  it("leaves the picture alone when somebody came back before it came", async () => {
    const { hub, told, choose } = await opened();
    await choose(5);
    await vi.advanceTimersByTimeAsync(1000);
    await choose(1);
    expect(told()).toEqual({ kind: "ready", head: 1, code: 1 });
    await hub.answer(5);
    await vi.advanceTimersByTimeAsync(1000);
    expect(told()).toEqual({ kind: "ready", head: 1, code: 1 });
    await choose(5);
    await vi.advanceTimersByTimeAsync(0);
    expect(told()).toEqual({ kind: "ready", head: 5, code: 5 });
    expect(hub.asked).toEqual([1, 5]);
  });

  it("takes no word of another head with it when somebody comes back", async () => {
    const { hub, told, choose } = await opened();
    await choose(5);
    await hub.refuse(5);
    expect(told()).toMatchObject({ kind: "error", head: 5 });
    await choose(1);
    expect(told()).toEqual({ kind: "ready", head: 1, code: 1 });
    await vi.advanceTimersByTimeAsync(10_000);
    expect(hub.asked).toEqual([1, 5]);
  });
});
