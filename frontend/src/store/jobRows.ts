/** Rows of a list of jobs, of a hub or a gateway. Pure. */
import type { GatewayJob, JobEntry, JobView } from "../api/types";
import { ABSENT, integer } from "./format";
import { NOTHING, type Selection } from "./selection";

export interface JobRow {
  readonly uid: string;
  readonly namespace: string;
  readonly name: string;
  readonly phase: string;
  /** Finished steps, of how many. */
  readonly iteration: string;
  /** null: not known here. */
  readonly restarts: number | null;
  /** What is wrong, the gravest first; null if nothing is. */
  readonly finding: string | null;
  /** Selection that opens the job; what it leaves out stays as it is. null: `command` opens it, in a terminal. */
  readonly opens: Partial<Selection> | null;
  readonly command: string | null;
}

function iterationOf(iteration: number | null, total: number | null): string {
  if (iteration === null) return ABSENT;
  return total === null ? integer(iteration) : `${integer(iteration)} / ${integer(total)}`;
}

/** The first sentence, and how many more there are. */
function findingOf(sentences: readonly string[], hungRanks: readonly number[]): string | null {
  const [first, ...others] = sentences;
  if (hungRanks.length > 0) return `Rank ${hungRanks.join(", ")} hangs.`;
  if (first === undefined) return null;
  return others.length === 0 ? first : `${first} (${others.length} more)`;
}

/** A job behind a gateway. */
export const rowOfGateway = (job: GatewayJob): JobRow => ({
  uid: job.uid,
  namespace: job.namespace,
  name: job.name,
  phase: job.phase,
  iteration: iterationOf(job.iteration, job.totalIterations),
  restarts: job.restarts,
  finding: findingOf(job.findings, job.hungRanks),
  opens: { ...NOTHING, job: `${job.namespace}/${job.name}` },
  command: null,
});

/** The job of a hub, with what its page knows already, or another one of the same user. */
export function rowOfHub(entry: JobEntry, view: JobView | null, sentences: readonly string[]): JobRow {
  if (!entry.here) {
    return {
      uid: entry.uid,
      namespace: entry.namespace,
      name: entry.name,
      phase: entry.phase,
      iteration: iterationOf(entry.iteration ?? null, entry.totalIterations ?? null),
      restarts: entry.restarts ?? null,
      finding: findingOf(entry.findings, []),
      opens: null,
      command: `megatronapp ui ${entry.name}`,
    };
  }
  return {
    uid: entry.uid,
    namespace: entry.namespace,
    name: entry.name,
    phase: entry.phase,
    iteration: iterationOf(view?.progress?.iteration ?? null, view?.progress?.totalIterations ?? null),
    restarts: null,
    finding: findingOf(sentences, []),
    opens: { page: null },
    command: null,
  };
}

/** Jobs with a finding first; else in the given order. */
export const ordered = (rows: readonly JobRow[]): JobRow[] =>
  [...rows].sort((left, right) => Number(right.finding !== null) - Number(left.finding !== null));
