/** Jobs in a list, in words. Pure. */
import type { DoorJob } from "../api/types";
import { ABSENT, integer } from "./format";

/** How a job is named in an address. */
export const placeOf = (job: DoorJob): string => `${job.namespace}/${job.name}`;

/** Finished steps, of how many. */
export function iterationOf(job: DoorJob): string {
  if (job.iteration === null) return ABSENT;
  const total = job.totalIterations === null ? "" : ` / ${integer(job.totalIterations)}`;
  return integer(job.iteration) + total;
}

/** What is wrong with a job, the gravest first; null if nothing is. */
export function findingOf(job: DoorJob): string | null {
  const [first, ...others] = job.findings;
  if (job.hungRanks.length > 0) return `Rank ${job.hungRanks.join(", ")} hangs.`;
  if (first === undefined) return null;
  return others.length === 0 ? first : `${first} (${others.length} more)`;
}

/** Jobs with a finding first; else as they came. */
export const ordered = (jobs: readonly DoorJob[]): DoorJob[] =>
  [...jobs].sort((left, right) => Number(findingOf(right) !== null) - Number(findingOf(left) !== null));
