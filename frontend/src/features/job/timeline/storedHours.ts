/** What the hub has on disk of the traces of a job, in words. */
import type { HistoryView, Schemas } from "../../../api/types";
import { bytes, integer } from "../../../store/format";

export type History = HistoryView;
export type HistoryHour = Schemas["HistoryHour"];

/** An hour that can be opened: its first step. */
export interface HourChoice {
  readonly value: number;
  readonly label: string;
}

const timeOf = (hour: string): Date => new Date(`${hour}:00:00Z`);

/** 28 Nov, 21:00, in the time of the browser. */
export const hourText = (hour: string): string =>
  timeOf(hour).toLocaleString("en-GB", {
    day: "numeric",
    month: "short",
    hour: "2-digit",
    minute: "2-digit",
  });

/** The hours in which a step ended, newest first. Steps repeat after a restart: older attempts are named. */
export function hourChoices(history: History): HourChoice[] {
  const newest = Math.max(...history.hours.map(({ attempt }) => attempt));
  return history.hours
    .flatMap(({ hour, attempt, firstStep, lastStep }) => {
      if (firstStep === null || lastStep === null || attempt < newest) return [];
      const label = `${hourText(hour)}: steps ${integer(firstStep)} to ${integer(lastStep)}`;
      return [{ value: firstStep, label }];
    })
    .reverse();
}

/** One sentence on how far back spans are stored; empty where the hub stores nothing yet. */
export function historyText(history: History): string {
  const [oldest] = history.hours;
  if (!oldest) return "";
  const size = `${bytes(history.bytes)} of ${bytes(history.limitBytes)}`;
  const { until, records } = history.dropped;
  const dropped = until === null ? "" : ` Older ones, ${integer(records)} records, were deleted for space.`;
  const damaged =
    history.damagedFiles === 0 ? "" : ` Files that cannot be read: ${integer(history.damagedFiles)}.`;
  return `Spans are stored since ${hourText(oldest.hour)} (${size}).${dropped}${damaged}`;
}
