/** Kinds of spans as `megatronapp_common.trace.RecordKind` numbers them, and the one legend they share. */
import type { ThemeName } from "../render/colour";

export const Kind = {
  STEP: 1,
  DATA: 2,
  FORWARD: 3,
  BACKWARD: 4,
  SEND_POST: 5,
  SEND_WAIT: 6,
  RECV_POST: 7,
  RECV_WAIT: 8,
  GRAD_REDUCE: 9,
  PARAM_GATHER: 10,
  EMBED_REDUCE: 11,
  GRAD_NORM: 12,
  OPTIMIZER: 13,
  LOSS_REDUCE: 14,
  EVALUATE: 15,
  CHECKPOINT: 16,
  TP_REDUCE: 17,
  TP_GATHER: 18,
  LAYER_FORWARD: 19,
  LAYER_BACKWARD: 20,
  FAULT: 21,
  GC: 22,
  WEIGHT: 23,
  COPY: 24,
  PAUSE: 25,
  CAPTURE: 26,
  PERTURB: 27,
  STOPPED: 28,
  WORK: 29,
  NCCL: 30,
  METRIC: 32,
  COUNTER: 33,
} as const;

export const Flag = {
  SATURATED: 1,
  AUX_BYTES: 2,
  AUX_WORK: 4,
  AUX_RUN_QUEUE: 8,
  DEVICE_CLOCK: 16,
  SKIPPED_UPDATE: 32,
  INJECTED: 64,
  AUX_LEAD: 128,
} as const;

/** Bits of the flags of passes alone. */
export const PassFlag = {
  EARLY: 32,
} as const;

const PASSES: ReadonlySet<number | undefined> = new Set([Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT]);

/** Whether a record is of a pass that ran before its turn in the plan; other kinds use the bit for something else. */
export const isEarly = (kind: number | undefined, flags: number): boolean =>
  PASSES.has(kind) && (flags & PassFlag.EARLY) !== 0;

export type Group =
  | "forward"
  | "backward"
  | "weight"
  | "optimizer"
  | "wait"
  | "transfer"
  | "shipment"
  | "collective"
  | "other"
  | "fault";

export interface GroupStyle {
  readonly label: string;
  readonly colour: Readonly<Record<ThemeName, string>>;
  /** Ink of a label on that colour. */
  readonly ink: Readonly<Record<ThemeName, string>>;
  readonly hatched: boolean;
}

const INK: GroupStyle["ink"] = { dark: "#0b0e12", light: "#ffffff" };
const style = (label: string, onDark: string, onLight: string, hatched = false, ink = INK): GroupStyle => ({
  label,
  colour: { dark: onDark, light: onLight },
  ink,
  hatched,
});

/** In legend order. Work is saturated, waiting recedes (grey, hatched), a fault has the colour of an alarm. */
export const GROUPS: Readonly<Record<Group, GroupStyle>> = {
  forward: style("Forward", "#6cb8f0", "#1f78c1"),
  backward: style("Backward", "#8f8be8", "#5a4fcf"),
  weight: style("Weight gradients", "#b48ce0", "#8a3fc0"),
  optimizer: style("Optimizer", "#e59ac4", "#b0467f"),
  collective: style("Collective", "#b5a15a", "#8d7a3c"),
  transfer: style("Transfer", "#4fc4a1", "#0c7d5e"),
  shipment: style("Shipment to a backward rank", "#a9d158", "#4d7c0f"),
  wait: style("Waiting for a peer", "#2b333e", "#e3e7ed", true, { dark: "#c3ccd8", light: "#3b4656" }),
  other: style("Data, evaluation, checkpoint", "#b39b85", "#7a6350"),
  fault: style("Injected fault", "#ff9152", "#c24409", true),
};

interface KindStyle {
  readonly label: string;
  readonly short: string;
  readonly group: Group;
}

const kind = (group: Group, label: string, short = label): KindStyle => ({ label, short, group });

const KINDS: Readonly<Record<number, KindStyle>> = {
  [Kind.STEP]: kind("other", "Step", ""),
  [Kind.DATA]: kind("other", "Data"),
  [Kind.FORWARD]: kind("forward", "Forward", "F"),
  [Kind.BACKWARD]: kind("backward", "Backward", "B"),
  [Kind.SEND_POST]: kind("transfer", "Post send", "Send"),
  [Kind.SEND_WAIT]: kind("wait", "Wait for send", "Wait send"),
  [Kind.RECV_POST]: kind("transfer", "Post receive", "Recv"),
  [Kind.RECV_WAIT]: kind("wait", "Wait for receive", "Wait"),
  [Kind.GRAD_REDUCE]: kind("collective", "Gradient reduction", "Grad reduce"),
  [Kind.PARAM_GATHER]: kind("collective", "Parameter gather", "Param gather"),
  [Kind.EMBED_REDUCE]: kind("collective", "Embedding reduction", "Embed reduce"),
  [Kind.GRAD_NORM]: kind("collective", "Gradient norm", "Grad norm"),
  [Kind.OPTIMIZER]: kind("optimizer", "Optimizer"),
  [Kind.LOSS_REDUCE]: kind("collective", "Loss reduction", "Loss reduce"),
  [Kind.EVALUATE]: kind("other", "Evaluation", "Evaluate"),
  [Kind.CHECKPOINT]: kind("other", "Checkpoint"),
  [Kind.PAUSE]: kind("other", "Paused by an order", "Paused"),
  [Kind.CAPTURE]: kind("other", "Statistics of layers", "Capture"),
  [Kind.STOPPED]: kind("other", "Process stopped", "Stopped"),
  [Kind.PERTURB]: kind("other", "Perturbed step", "Perturbed"),
  [Kind.TP_REDUCE]: kind("collective", "Tensor reduction", "TP reduce"),
  [Kind.TP_GATHER]: kind("collective", "Tensor gather", "TP gather"),
  [Kind.LAYER_FORWARD]: kind("forward", "Layer forward", "L"),
  [Kind.LAYER_BACKWARD]: kind("backward", "Layer backward", "L"),
  [Kind.FAULT]: kind("fault", "Injected fault", "Fault"),
  [Kind.WEIGHT]: kind("weight", "Weight gradients", "W"),
  [Kind.COPY]: kind("transfer", "Copy of a message", "Copy"),
  [Kind.NCCL]: kind("transfer", "Transfer of NCCL", "NCCL"),
  [Kind.GC]: kind("other", "Garbage collection", "GC"),
};

/** Colour and name of a kind; kinds of a newer hub are shown by number. */
export function kindStyle(kind: number): KindStyle {
  return KINDS[kind] ?? { label: `Kind ${kind}`, short: `${kind}`, group: "other" };
}

/** Role of a rank of MegaFBD. */
export type Role = "forward" | "backward";

/** The role of a rank if it has one; null for ranks that run all passes. */
export const roleNamed = (role: "all" | Role | undefined): Role | null =>
  role === "forward" || role === "backward" ? role : null;

/** Message between the roles of MegaFBD: saved tensors on their way, or a credit for memory that is free again. */
export type Crossing = "shipment" | "credit";

const SENDS: ReadonlySet<number> = new Set([Kind.SEND_POST, Kind.SEND_WAIT]);

/** What a transfer of a rank is, by the roles of both ends; null within a role and without roles. */
export function crossingOf(kind: number, own: Role | null, peer: Role | null): Crossing | null {
  if (own === null || peer === null || own === peer) return null;
  return (SENDS.has(kind) ? own : peer) === "forward" ? "shipment" : "credit";
}

const OF_CROSSING: Readonly<Record<number, string>> = {
  [Kind.SEND_POST]: "Post",
  [Kind.SEND_WAIT]: "Wait for send of",
  [Kind.RECV_WAIT]: "Wait for",
  [Kind.COPY]: "Copy of",
};

/** Colour and name of a span: those of its kind, but for messages between roles. */
export function spanStyle(span: { readonly kind: number; readonly crossing: Crossing | null }): KindStyle {
  const plain = kindStyle(span.kind);
  const verb = OF_CROSSING[span.kind];
  if (span.crossing === null || verb === undefined) return plain;
  const shipped = span.crossing === "shipment" && plain.group === "transfer";
  return {
    label: `${verb} a ${span.crossing}`,
    short: plain.short,
    group: shipped ? "shipment" : plain.group,
  };
}
