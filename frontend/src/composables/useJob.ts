/** Everything known of the job, kept fresh by history over HTTP and the live socket. Provided once, injected by panels. */
import { computed, inject, onBeforeUnmount, provide, type InjectionKey } from "vue";
import { asApiError, isAbort, type ApiClient } from "../api/client";
import { activeVerdicts, suspectRanks } from "../store/verdicts";
import { LiveConnection, liveUrl, type LiveEvents } from "../wire/live";
import { createJobState, loadJob, loadSteps, takeFrame, type JobState } from "./jobState";

type Connect = (events: LiveEvents) => Pick<LiveConnection, "open" | "close">;

const connectTo =
  (client: ApiClient): Connect =>
  (events) =>
    new LiveConnection(liveUrl(document.baseURI, client.root), events);

/** Statuses after which nothing is shown any more: not logged in, no right to the job, no such job. */
const REFUSED: ReadonlySet<number> = new Set([401, 403, 404]);

/** Loads the history; a failure shows only where there is nothing older to show, or where access is refused. */
function createLoader(client: ApiClient, state: JobState, onRefused: () => void) {
  let pending: AbortController | undefined;
  /** A load that has not requested any steps yet. */
  let early: AbortController | undefined;
  /** True if the connection opened during an early load, which then has another chance if it fails. */
  let again = false;
  async function refresh(): Promise<void> {
    pending?.abort();
    const request = (pending = early = new AbortController());
    again = false;
    const { signal } = request;
    const requestsSteps = (): void => {
      if (early === request) early = undefined;
    };
    try {
      const job = await loadJob(client, state, signal);
      requestsSteps();
      await loadSteps(client, state, job, signal);
      state.load.value = { kind: "ready" };
    } catch (error) {
      requestsSteps();
      if (isAbort(error)) return;
      const problem = asApiError(error);
      const refused = problem.status === 401;
      if (refused || state.load.value.kind !== "ready") state.load.value = { kind: "error", error: problem };
      if (refused) onRefused();
      else if (REFUSED.has(problem.status)) void check();
      else if (again) void refresh();
    }
  }
  /** Load what has happened until the connection opened, unless it is all requested later: frames begin with the job. */
  function connected(): void {
    if (early) again = true;
    else void refresh();
  }
  /** See whether the job is still there, and may still be read: a socket that is refused does not say why. */
  async function check(): Promise<void> {
    try {
      await client.job();
    } catch (error) {
      const problem = asApiError(error);
      if (!REFUSED.has(problem.status)) return;
      state.load.value = { kind: "error", error: problem };
      onRefused();
    }
  }
  return { refresh, connected, check, cancel: () => pending?.abort() };
}

/** State, derived values and actions of one job's page. */
export function createJob(client: ApiClient, connect: Connect = connectTo(client)) {
  const state = createJobState();
  const connection = connect({
    onFrame: (frame) => takeFrame(state, frame),
    onBadFrame: (error) => (state.notice.value = `The hub sent what this page cannot read: ${error.message}`),
    onState: (now) => {
      const before = state.live.value.kind;
      state.live.value = now;
      if (now.kind === "live" && before !== "live") loader.connected();
      if (before === "lost" && now.kind === "lost") void loader.check();
    },
    onRefused: (reason) => {
      state.notice.value = reason;
      void loader.check();
    },
  });
  const loader = createLoader(client, state, () => connection.close());

  return {
    ...state,
    client,
    newestStep: computed(() => state.steps.value.newest),
    active: computed(() => activeVerdicts(state.verdicts.value)),
    suspects: computed(() => suspectRanks(state.verdicts.value)),
    start: () => {
      connection.open();
      void loader.refresh();
    },
    stop: () => {
      loader.cancel();
      connection.close();
    },
    /** Try again now, at the user's request. */
    reconnect: () => {
      state.notice.value = null;
      if (state.load.value.kind === "error") state.load.value = { kind: "loading" };
      connection.open();
      void loader.refresh();
    },
  };
}

export type JobApi = ReturnType<typeof createJob>;

const KEY: InjectionKey<JobApi> = Symbol("job");

/** Creates the state for a page and its panels; it lives as long as the component that called this. */
export function provideJob(client: ApiClient): JobApi {
  const api = createJob(client);
  provide(KEY, api);
  api.start();
  onBeforeUnmount(api.stop);
  return api;
}

/** The state that the page above provided. */
export function useJob(): JobApi {
  const api = inject(KEY);
  if (!api) throw new Error("useJob outside of a job's page");
  return api;
}
