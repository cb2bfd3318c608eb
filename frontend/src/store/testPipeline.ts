/** Plans and steps of a pipeline for tests. */
import type { PipelineView, PlanPeriod, Schemas } from "../api/types";

type Plan = Schemas["PipelinePlan"];

export function periodOf(plan: Partial<Plan>, measured: Partial<Omit<PlanPeriod, "plan">> = {}): PlanPeriod {
  return {
    plan: {
      fromStep: 0,
      schedule: "auto",
      plan: "order of megatron-core",
      microbatches: 8,
      chunks: 2,
      capChunks: 9,
      spareChunks: 2,
      chosen: false,
      ...plan,
    },
    steps: 0,
    seconds: null,
    bubble: null,
    rankBubbles: [],
    earlyPerStep: null,
    ...measured,
  };
}

export function viewOf(plans: PlanPeriod[], more: Partial<PipelineView> = {}): PipelineView {
  return {
    attempt: 0,
    stages: 2,
    plans,
    steps: [4, 5],
    seconds: [0.3, 0.26],
    bubble: [0.4, 0.22],
    early: [0, 3],
    passes: [32, 32],
    transfers: [
      {
        source: 0,
        destination: 1,
        path: "shared-memory",
        transfers: 16,
        bytes: 32_768,
        copySeconds: 16e-5,
        bytesPerSecond: 204_800_000,
      },
    ],
    transferSteps: 2,
    ...more,
  };
}
