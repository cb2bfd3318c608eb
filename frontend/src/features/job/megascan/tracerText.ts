/** The state of the tracer as facts and rows. Pure. */
import type { TracerHealth } from "../../../api/types";
import { ABSENT, compact, integer, rankList, seconds } from "../../../store/format";
import type { Tracer, TraceWindow } from "./megascanApi";

export function tracerFacts(tracer: Tracer, health: TracerHealth | undefined): (readonly [string, string])[] {
  const lost = tracer.workers.reduce((sum, worker) => sum + worker.lost, 0);
  return [
    ["Records received", compact(tracer.records)],
    ["Records lost", lost === 0 ? "none" : integer(lost)],
    ["Ranks without records", tracer.missingRanks.length === 0 ? "none" : rankList(tracer.missingRanks)],
    [
      "Cost of recording",
      tracer.overhead === null ? ABSENT : `${(tracer.overhead * 100).toPrecision(2)} % of a step`,
    ],
    ["Analysis is late by", seconds(tracer.lagSeconds ?? health?.lagSeconds ?? null)],
    [
      "Steps not judged",
      tracer.skippedSteps + tracer.detectorFailures === 0
        ? "none"
        : `${integer(tracer.skippedSteps)} too many, ${integer(tracer.detectorFailures)} failed`,
    ],
    ["Steps stored in full", integer(tracer.storedSteps)],
  ];
}

/** "steps 12 to 14, parts of layers, ranks 3 and 4, for a verdict" */
export function windowText({ fromStep, steps, granularity, ranks, reason }: TraceWindow): string {
  const last = fromStep + steps - 1;
  return [
    last === fromStep ? `step ${fromStep}` : `steps ${fromStep} to ${last}`,
    granularity === "base" ? "tensor-parallel collectives" : "parts of layers",
    ranks ? `tensor groups of ${rankList(ranks)}` : "all ranks",
    ...(reason ? ["for a verdict"] : []),
  ].join(", ");
}

export const WORKER_COLUMNS = ["Worker", "Node", "Ranks", "Agent", "Records lost", "Clock"];

export const workerCells = (worker: Tracer["workers"][number]): string[] => [
  `worker ${worker.worker}`,
  worker.node,
  integer(worker.ranks),
  worker.connected ? "connected" : "disconnected",
  worker.lost === 0 ? "none" : integer(worker.lost),
  worker.clockSeconds === null
    ? "unknown"
    : worker.clockSeconds === 0
      ? "shared"
      : `± ${seconds(worker.clockSeconds)}`,
];
