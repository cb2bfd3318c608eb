/** The run that the shown one is compared with: one of this hub, or the one in a session file. */
import { computed, ref, shallowRef } from "vue";
import { useSelection } from "../../../composables/useSelection";
import { RecordedClient } from "../../../scope/session/recordedClient";
import { readSession, type RecordedSession } from "../../../scope/session/recordedSession";
import { TileStore } from "../../../scope/store/tileStore";
import type { LiveState } from "../../../wire/live";
import { useScope, type ScopeApi } from "../useScope";
import { withWholeLenses } from "./wholeLenses";

/** Session files are read whole. */
const MOST_BYTES = 512 << 20;

/** The scope of a file: nothing of it changes. */
function recordedScope(scope: ScopeApi, session: RecordedSession): ScopeApi {
  const client = new RecordedClient(withWholeLenses(session));
  return {
    ...scope,
    client,
    hello: shallowRef(session.hello),
    status: shallowRef(null),
    live: shallowRef<LiveState>({ kind: "live" }),
    store: session.store,
    tiles: new TileStore(client),
    runId: computed(() => session.run),
    run: computed(() => session.store.runs.get(session.run) ?? null),
  };
}

interface Opened {
  readonly name: string;
  readonly session: RecordedSession;
  readonly scope: ScopeApi;
}
/** Stays while the page is open, so that another view or run does not lose the file. */
const opened = shallowRef<Opened | null>(null);

export function useSecondRun() {
  const scope = useScope();
  const { selection, select } = useSelection();
  const problem = ref<string | null>(null);
  const live: ScopeApi = {
    ...scope,
    runId: computed(() => selection.value.with),
    run: computed(() => {
      const { with: id } = selection.value;
      return scope.version.value >= 0 && id !== null ? (scope.store.runs.get(id) ?? null) : null;
    }),
  };
  const isOpen = computed(
    () =>
      opened.value !== null &&
      opened.value.name === selection.value.file &&
      opened.value.session.run === selection.value.with,
  );
  const second = computed<ScopeApi | null>(() => {
    if (selection.value.with === null) return null;
    if (selection.value.file === null) return live;
    return isOpen.value ? (opened.value?.scope ?? null) : null;
  });
  async function open(file: File): Promise<void> {
    problem.value = null;
    try {
      if (file.size > MOST_BYTES)
        throw new Error("It is larger than 512 MiB; serve it by `megatronapp scope replay`.");
      const session = readSession(new Uint8Array(await file.arrayBuffer()));
      opened.value = { name: file.name, session, scope: recordedScope(scope, session) };
      select({ with: session.run, file: file.name });
    } catch (error) {
      problem.value = `${file.name}: ${error instanceof Error ? error.message : String(error)}`;
    }
  }
  return {
    second,
    open,
    problem,
    /** The address names a file that this page has not read. */
    absent: computed(() => selection.value.file !== null && !isOpen.value),
    broken: computed(() => (isOpen.value ? (opened.value?.session.broken ?? null) : null)),
  };
}
