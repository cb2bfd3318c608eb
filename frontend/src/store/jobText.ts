/** The job's layout and tracer in words. */
import type { Layout, TracerHealth } from "../api/types";
import { integer, seconds } from "./format";

const AXES: readonly (readonly [keyof Layout, string])[] = [
  ["tensor", "TP"],
  ["pipeline", "PP"],
  ["virtualPipeline", "VPP"],
  ["context", "CP"],
  ["expert", "EP"],
  ["data", "DP"],
];

/** "PP2 × DP2"; axes of size 1 are left out. */
export function layoutText(layout: Layout): string {
  const parts = AXES.filter(([axis]) => layout[axis] > 1).map(([axis, short]) => `${short}${layout[axis]}`);
  return parts.length === 0 ? "one rank" : parts.join(" × ");
}

export interface TracerText {
  readonly text: string;
  readonly note: string;
  readonly tone: "good" | "warn" | "off";
}

export function tracerText(tracer: TracerHealth): TracerText {
  const lag = tracer.lagSeconds;
  const behind =
    lag === null || lag === undefined ? "" : `${seconds(Math.max(0, Math.round(lag * 100) / 100))} behind`;
  if (tracer.state === "off") return { text: "off", note: "no rank sends a trace", tone: "off" };
  const missing = tracer.missingRanks.length;
  if (missing > 0)
    return {
      text: missing === 1 ? `rank ${tracer.missingRanks[0]} missing` : `${integer(missing)} ranks missing`,
      note: "the others are judged without",
      tone: "warn",
    };
  if (tracer.state === "lossy")
    return { text: `${integer(tracer.lost)} lost`, note: "verdicts may be late", tone: "warn" };
  return { text: "complete", note: behind, tone: "good" };
}
