/** State of a MegaScope screen: the hub's messages, the store of frames, and the selected run. */
import {
  computed,
  inject,
  onBeforeUnmount,
  provide,
  ref,
  shallowRef,
  watch,
  type ComputedRef,
  type InjectionKey,
} from "vue";
import { asApiError, isAbort, type ApiClient } from "../../api/client";
import { ScopeClient } from "../../scope/client";
import { FrameStore } from "../../scope/store/frameStore";
import {
  hasModel,
  type EarlyHello,
  type Hello,
  type RunSummary,
  type ScopeStatus,
} from "../../scope/protocol";
import { ScopeStream } from "../../scope/stream";
import { TileStore } from "../../scope/store/tileStore";
import { liveUrl, type LiveState } from "../../wire/live";
import type { LoadState } from "../../composables/jobState";
import { useSelection } from "../../composables/useSelection";

/** How often the model is requested while it starts. */
const AGAIN_MS = 2000;

/** How long the page was disconnected, and the first gap of the run since then. */
export interface Back {
  readonly seconds: number;
  readonly run: string | null;
  readonly gaps: number;
  /** Frames of the run that were here: a hub that has it again sends more. */
  readonly frames: number;
  /** Whether the hub listed the run in its hello. */
  readonly known: boolean;
  /** Whether it is another hub than before; null: unknown. */
  readonly restarted: boolean | null;
}

function createState() {
  return {
    /** null: no answer yet, or no model. */
    hello: shallowRef<Hello | null>(null),
    /** The hub answers, but no rank of the model has started. */
    waiting: ref(false),
    load: shallowRef<LoadState>({ kind: "loading" }),
    live: shallowRef<LiveState>({ kind: "connecting" }),
    status: shallowRef<ScopeStatus | null>(null),
    runs: shallowRef<readonly RunSummary[]>([]),
    notice: ref<string | null>(null),
    /** The connection was lost and is back; null: it never was. */
    back: shallowRef<Back | null>(null),
    /** Counts changes of the store, at most once per painted frame. */
    version: ref(0),
  };
}

type State = ReturnType<typeof createState>;

/** Updates of runs since the list arrived; new runs are prepended. */
function withNew(runs: readonly RunSummary[], store: FrameStore): readonly RunSummary[] {
  const known = new Set(runs.map(({ run }) => run));
  const fresh = [...store.runs.values()].filter(({ header }) => !known.has(header.run));
  const updated = runs.map((one) => store.runs.get(one.run)?.header ?? one);
  if (fresh.length === 0 && updated.every((one, index) => one === runs[index])) return runs;
  return [...fresh.reverse().map(({ header }) => header), ...updated];
}

/** Changes are shown in the next frame; what was shown in it is painted in the one after, and then credit goes back. */
function createPainter(state: State, store: FrameStore, painted: () => void) {
  let [frame, changes] = [0, 0];
  const show = (): void => {
    const shown = changes;
    state.runs.value = withNew(state.runs.value, store);
    state.version.value += 1;
    frame = requestAnimationFrame(() => {
      frame = 0;
      painted();
      if (changes > shown) schedule();
    });
  };
  const schedule = (): void => {
    frame ||= requestAnimationFrame(show);
  };
  return {
    changed: (): void => {
      changes += 1;
      schedule();
    },
    stop: () => cancelAnimationFrame(frame),
  };
}

/** Ranks that start after the page report their part of the model later. */
function setStatus(state: State, status: ScopeStatus): void {
  state.status.value = status;
  const hello = state.hello.value;
  if (hello && status.layout) state.hello.value = { ...hello, layout: status.layout };
}

export function createScope(api: ApiClient) {
  const client = new ScopeClient(api);
  const state = createState();
  const store = new FrameStore();
  const { selection } = useSelection();
  let lostAt: number | null = null;
  /** Called once a new connection after a lost one has its hello. */
  const reportReconnect = (hello: EarlyHello, restarted: boolean | null): void => {
    state.notice.value = null;
    if (lostAt === null || state.live.value.kind !== "live") return;
    const id = runId.value;
    state.back.value = {
      seconds: (Date.now() - lostAt) / 1000,
      run: id,
      gaps: run.value?.gaps.length ?? 0,
      frames: run.value?.version ?? 0,
      known: id === null || hello.runs.some((one) => one.run === id),
      restarted,
    };
    lostAt = null;
  };
  const setHello = (hello: EarlyHello): void => {
    state.load.value = { kind: "ready" };
    state.waiting.value = !hasModel(hello);
    if (!hasModel(hello)) return loader.again();
    state.hello.value = hello;
    state.runs.value = withNew(hello.runs, store);
    state.status.value = { state: hello.state };
  };
  const stream = new ScopeStream(liveUrl(document.baseURI, api.root, "scope"), store, {
    onHello: (hello, restarted) => (reportReconnect(hello, restarted), setHello(hello)),
    onStatus: (status) => setStatus(state, status),
    onChange: () => painter.changed(),
    onState: (live) => {
      if (live.kind === "lost") lostAt ??= live.since;
      state.live.value = live;
    },
    onProblem: (message) => (state.notice.value = message),
  });
  const painter = createPainter(state, store, () => stream.painted());
  const loader = createLoader(client, state, setHello);
  const runId = computed(() => selection.value.run ?? state.runs.value[0]?.run ?? null);
  const run = computed(() =>
    state.version.value >= 0 && runId.value !== null ? (store.runs.get(runId.value) ?? null) : null,
  );
  followRuns(runId, state, store, stream);
  return {
    ...state,
    client,
    store,
    tiles: new TileStore(client),
    runId,
    run,
    start: () => (stream.open(), void loader.load()),
    stop: () => (loader.cancel(), painter.stop(), stream.close()),
    reconnect: () => (stream.open(), void loader.load()),
  };
}

/** Keeps what was sent of the selected run and of the one that it is compared with, and requests what is missing. */
function followRuns(
  runId: ComputedRef<string | null>,
  state: State,
  store: FrameStore,
  stream: ScopeStream,
): void {
  const { selection } = useSelection();
  /** Of this hub; a run in a file is not followed. */
  const compared = computed(() => (selection.value.file === null ? selection.value.with : null));
  const keep = (): void => void ([store.selected, store.compared] = [runId.value, compared.value]);
  watch([runId, compared], keep, { immediate: true, flush: "sync" });
  /** The hub's ring has what was sent before this page connected. */
  const ready = computed(() => state.live.value.kind === "live" && state.hello.value !== null);
  watch([runId, compared, ready], () => {
    const wanted = [runId.value, compared.value].filter((id) => id !== null);
    if (ready.value) stream.follow(...new Set(wanted));
  });
}

function createLoader(client: ScopeClient, state: State, setHello: (hello: EarlyHello) => void) {
  let pending: AbortController | undefined;
  let timer: ReturnType<typeof setTimeout> | undefined;
  async function load(): Promise<void> {
    pending?.abort();
    const { signal } = (pending = new AbortController());
    try {
      setHello(await client.hello(signal));
    } catch (error) {
      if (isAbort(error) || state.hello.value) return;
      state.load.value = { kind: "error", error: asApiError(error) };
    }
  }
  return {
    load,
    again: () => {
      clearTimeout(timer);
      timer = setTimeout(() => void load(), AGAIN_MS);
    },
    cancel: () => {
      clearTimeout(timer);
      pending?.abort();
    },
  };
}

export type ScopeApi = ReturnType<typeof createScope>;

const KEY: InjectionKey<ScopeApi> = Symbol("scope");

export function provideScope(api: ApiClient): ScopeApi {
  const scope = createScope(api);
  provide(KEY, scope);
  scope.start();
  onBeforeUnmount(scope.stop);
  return scope;
}

/** Panels below this component show the run of another scope. */
export const provideAs = (scope: ScopeApi): void => provide(KEY, scope);

export function useScope(): ScopeApi {
  const scope = inject(KEY);
  if (!scope) throw new Error("useScope outside of a scope screen");
  return scope;
}
