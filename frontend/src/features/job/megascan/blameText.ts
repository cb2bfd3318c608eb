/** The blame of a step as rows and sentences. Pure. */
import { rankList, seconds } from "../../../store/format";
import type { Blame, Blamed, Victim } from "./megascanApi";

const CAUSES: Readonly<Record<Blamed["cause"], string>> = {
  compute: "compute",
  host: "host, between spans",
  link: "delivery",
  collective: "transfer of a collective",
  other: "other spans",
};

export const blamedName = ({ ranks, cause }: Blamed): string =>
  cause === "link" && ranks.length > 1
    ? `Link ${ranks[0]} → ${ranks[1]}`
    : rankList(ranks).replace(/^r/, "R");

export interface BlamedRow {
  readonly name: string;
  readonly cause: string;
  readonly text: string;
  /** Of the time lost, for a bar. */
  readonly fraction: number;
  readonly rank: number | null;
}

/** Those with most blame, at most `most`, and none below 1 % of the time lost. */
export function blamedRows({ blamed, recordedSeconds, idealSeconds }: Blame, most = 6): BlamedRow[] {
  const lost = Math.max(recordedSeconds - idealSeconds, 1e-12);
  return blamed
    .filter((entry) => entry.seconds >= 0.01 * lost)
    .slice(0, most)
    .map((entry) => ({
      name: blamedName(entry),
      cause: CAUSES[entry.cause],
      text: seconds(entry.seconds),
      fraction: Math.min(1, entry.seconds / lost),
      rank: entry.ranks.at(-1) ?? null,
    }));
}

export const victimText = ({ rank, waitedFor, seconds: lost }: Victim): string =>
  `Rank ${rank} waited ${seconds(lost)} for rank ${waitedFor}`;

/** A step that is hardly longer than usual has no culprit. */
export const isSlow = ({ recordedSeconds, idealSeconds }: Blame): boolean =>
  recordedSeconds > 1.01 * idealSeconds;

export function blameSentence(blame: Blame): string {
  const { recordedSeconds, idealSeconds, blamedSeconds } = blame;
  if (!isSlow(blame)) return `Step ${blame.step} took ${seconds(recordedSeconds)}, as long as usual.`;
  const lost = recordedSeconds - idealSeconds;
  return `Step ${blame.step} took ${seconds(recordedSeconds)}, of which ${seconds(lost)} beyond the usual; the causes add up to ${seconds(blamedSeconds)}.`;
}
