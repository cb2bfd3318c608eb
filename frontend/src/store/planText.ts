/** Plans of MegaDPP as rows and sentences: what was simulated, what was measured, before and after the choice. */
import type { PlanPeriod, TransferView } from "../api/types";
import { bytes, integer, percent, ratio, seconds } from "./format";

export interface PlanRow {
  readonly name: string;
  readonly length: string;
  readonly bubble: string;
}

const plural = (count: number, noun: string): string => `${integer(count)} ${noun}${count === 1 ? "" : "s"}`;

/** The period before the plan in force: steps of the same batch size that the choice was made from. */
export function periodBefore(plans: readonly PlanPeriod[]): PlanPeriod | undefined {
  const last = plans.at(-1);
  return plans
    .slice(0, -1)
    .findLast(({ plan }) => !plan.chosen && plan.microbatches === last?.plan.microbatches);
}

/** Length of the passes and bubble: static order and plan, simulated and measured. */
export function planRows(plans: readonly PlanPeriod[]): PlanRow[] {
  const last = plans.at(-1);
  if (!last) return [];
  const { plan } = last;
  const before = periodBefore(plans);
  const measured = (name: string, period: PlanPeriod): PlanRow => ({
    name: `${name}, measured in ${plural(period.steps, "step")}`,
    length: seconds(period.seconds),
    bubble: percent(period.bubble),
  });
  return [
    ...(plan.chosen
      ? [
          {
            name: "Static order, simulated",
            length: seconds(plan.staticSeconds),
            bubble: percent(plan.staticBubble),
          },
        ]
      : []),
    ...(before ? [measured("Before the choice", before)] : []),
    ...(plan.chosen
      ? [
          {
            name: "Plan in force, simulated",
            length: seconds(plan.simulatedSeconds),
            bubble: percent(plan.simulatedBubble),
          },
        ]
      : []),
    measured("Plan in force", last),
  ];
}

/** Facts of the plan in force, each with its name. */
export function planFacts({ plan, seconds: measured }: PlanPeriod): (readonly [string, string])[] {
  const share = plan.simulatedSeconds && measured ? measured / plan.simulatedSeconds : null;
  return [
    ["Schedule", plan.schedule],
    ["Plan", plan.plan],
    ["In force", `since step ${plan.fromStep}`],
    ["Chosen by", choiceNote(plan)],
    [
      "Step",
      `${`${integer(plan.microbatches)} ${plan.microbatches === 1 ? "microbatch" : "microbatches"}`}, ${plural(plan.chunks, "chunk")} on each rank`,
    ],
    [
      "Memory cap",
      `${plural(plan.capChunks, "chunk")} of activations${plan.spareChunks > 0 ? `, ${integer(plan.spareChunks)} beyond the order's need` : ""}`,
    ],
    ...(share === null ? [] : [["Measured over simulated", ratio(share)] as const]),
  ];
}

function choiceNote({ schedule, chosen }: PlanPeriod["plan"]): string {
  if (chosen) return "the measured times of the first steps";
  return schedule === "auto" ? "nothing yet: the first steps are measured" : "the configuration";
}

/** Rank, and its bubble before the choice and under the plan in force. */
export function rankBubbles(plans: readonly PlanPeriod[], rank: number): string[] {
  const before = periodBefore(plans);
  const now = percent(plans.at(-1)?.rankBubbles[rank]);
  return before ? [`rank ${rank}`, percent(before.rankBubbles[rank]), now] : [`rank ${rank}`, now];
}

export interface TransferRow {
  readonly key: string;
  readonly cells: readonly string[];
}

/** From, to, path, messages and bytes of a step, time of a copy, bandwidth; `count`: steps that are summed. */
export function transferRows(transfers: readonly TransferView[], count: number): TransferRow[] {
  const steps = Math.max(count, 1);
  return transfers.map((pair) => ({
    key: `${pair.source} ${pair.destination} ${pair.path}`,
    cells: [
      `${pair.source} → ${pair.destination}`,
      pair.path.replaceAll("-", " "),
      integer(pair.transfers / steps),
      bytes(pair.bytes / steps),
      seconds(pair.copySeconds / Math.max(pair.transfers, 1)),
      pair.bytesPerSecond === null ? "–" : `${bytes(pair.bytesPerSecond)}/s`,
    ],
  }));
}
