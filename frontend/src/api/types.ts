/** Names for the generated schemas of the OpenAPI documents of hub and gateway. */
import type { components as GatewayComponents } from "./gateway";
import type { components } from "./hub";

export type Schemas = components["schemas"];

export type ForwardBackward = Schemas["ForwardBackward"];
export type Captures = Schemas["Captures"];
export type CapturedStepDetails = Schemas["CapturedStepDetails"];
export type Probes = Schemas["Probes"];
export type ProbeText = Schemas["ProbeText"];
export type ProbeResult = Schemas["ProbeResult"];
export type ProbeAttention = Schemas["ProbeAttention"];
export type SiteStatistics = Schemas["SiteStatistics"];
export type Quantity = Captures["quantity"];
export type ForwardBackwardView = Schemas["ForwardBackwardView"];
export type GatewayJob = GatewayComponents["schemas"]["GatewayJob"];
export type Fault = Schemas["Fault"];
export type FaultRequest = Schemas["FaultRequest"];
export type Heatmap = Schemas["Heatmap"];
export type HistoryView = Schemas["HistoryView"];
export type JobEntry = Schemas["JobEntry"];
export type JobView = Schemas["JobView"];
export type Layout = Schemas["Layout"];
export type PipelineView = Schemas["PipelineView"];
export type PlanPeriod = Schemas["PlanPeriod"];
export type Problem = Schemas["Problem"];
export type Progress = Schemas["Progress"];
export type RoleView = Schemas["RoleView"];
export type TransferView = Schemas["TransferView"];
export type RankView = Schemas["RankView"];
export type Series = Schemas["Series"];
export type StepView = Schemas["StepView"];
export type LeaseGrant = Schemas["LeaseGrant"];
export type LeaseRequest = Schemas["LeaseRequest"];
export type OrderRequest = Schemas["OrderRequest"];
export type OrderView = Schemas["OrderView"];
export type TrainingView = Schemas["TrainingView"];
export type Timeline = Schemas["Timeline"];
export type TimelineWindow = Schemas["TimelineWindow"];
export type TracerHealth = Schemas["TracerHealth"];
export type Verdict = Schemas["VerdictView"];

export const METRICS = ["slowdown", "compute", "wait", "step"] as const;
export type Metric = (typeof METRICS)[number];
