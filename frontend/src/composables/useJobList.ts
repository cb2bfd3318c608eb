/** A list of jobs, requested every few seconds while the page is visible. */
import { onBeforeUnmount, onMounted, shallowRef, type ShallowRef } from "vue";
import { asApiError, isAbort, type ApiError } from "../api/client";

export const REFRESH_MS = 5000;

export interface JobList<Job> {
  /** null: not known yet. The last list stays while requests fail. */
  readonly jobs: ShallowRef<readonly Job[] | null>;
  readonly problem: ShallowRef<ApiError | null>;
  readonly refresh: () => Promise<void>;
}

export function useJobList<Job>(request: (signal: AbortSignal) => Promise<readonly Job[]>): JobList<Job> {
  const jobs = shallowRef<readonly Job[] | null>(null);
  const problem = shallowRef<ApiError | null>(null);
  let pending: AbortController | undefined;
  let timer: ReturnType<typeof setInterval> | undefined;

  async function refresh(): Promise<void> {
    pending?.abort();
    const { signal } = (pending = new AbortController());
    try {
      jobs.value = await request(signal);
      problem.value = null;
    } catch (error) {
      if (isAbort(error)) return;
      problem.value = asApiError(error);
      if (problem.value.status === 401) clearInterval(timer); // the user has to log in again
    }
  }

  onMounted(() => {
    timer = setInterval(() => void (document.hidden || refresh()), REFRESH_MS);
    void refresh();
  });
  onBeforeUnmount(() => {
    clearInterval(timer);
    pending?.abort();
  });
  return { jobs, problem, refresh };
}
