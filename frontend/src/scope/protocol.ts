/** Frames, headers and requests of docs/scope-protocol.md, as the page uses them. */
export const SUBPROTOCOL = "megatronapp.scope.1";

export const ScopeFrame = {
  HELLO: 40,
  RUN: 41,
  STEP: 42,
  OVERVIEW: 43,
  ROWS: 44,
  GAP: 45,
  STATE: 46,
  PCA: 47,
  VALUES: 48,
  TILES: 50,
  ANALYSIS: 56,
} as const;

export interface Model {
  readonly layers: number;
  readonly hidden: number;
  readonly heads: number;
  readonly keyHeads: number;
  readonly headWidth: number;
  readonly mlpWidth: number;
  readonly gated: boolean;
  readonly vocabulary: number;
  readonly positions: "learned" | "rotary" | "none";
  readonly maxLength: number;
}

export interface Limits {
  readonly prompts: number;
  readonly tokens: number;
  readonly pinnedHeads: number;
  readonly ringBytes: number;
  readonly expressionLength: number;
}

export const STATES = ["qkv", "attention", "mlp1", "mlp2", "probabilities", "pca"] as const;
export type StateName = (typeof STATES)[number];
export type Preset = "default" | "lite" | "off";

export interface Head {
  readonly layer: number;
  readonly head: number;
}

export interface Capture {
  readonly preset: Preset;
  readonly states: Readonly<Record<StateName, boolean>>;
  readonly pixels: { readonly qkv: number; readonly mlp: number };
  readonly expression: { readonly qkv: string; readonly mlp: string };
  readonly rotary: "before" | "after";
  readonly pinned: readonly Head[];
  readonly candidates: number;
}

export const DEFAULT_CAPTURE: Capture = {
  preset: "default",
  states: { qkv: true, attention: true, mlp1: true, mlp2: true, probabilities: true, pca: true },
  pixels: { qkv: 96, mlp: 64 },
  expression: { qkv: "data.mean(dim=-1)", mlp: "data.mean(dim=-1)" },
  rotary: "after",
  pinned: [],
  candidates: 20,
};

export interface Sampling {
  readonly temperature: number;
  readonly topK: number;
  readonly topP: number;
  readonly seed: number | null;
  readonly stop: readonly string[];
}

export const DEFAULT_SAMPLING: Sampling = { temperature: 0.8, topK: 0, topP: 0.95, seed: 1234, stop: [] };

export interface RunRequest {
  readonly prompts: readonly string[];
  readonly tokens: number;
  readonly sampling: Sampling;
  readonly capture: Capture;
  /** A recipe, the name of one of the server, or "none"; absent: the active recipe of the server, if any. */
  readonly perturbation?: unknown;
}

/** A recipe of the manifest. */
export interface NamedPerturbation {
  readonly name: string;
  readonly digest: string;
  readonly active: boolean;
}

export type RunState = "queued" | "prefill" | "decoding" | "done" | "cancelled" | "failed";
export type Offset = readonly [number, number] | null;

export interface Prompt {
  readonly text: string;
  readonly ids: readonly number[];
  /** In UTF-16 units of the text; null where a token ends no character. */
  readonly offsets: readonly Offset[];
}

/** Header of SCOPE_RUN. What a queued run does not know yet is absent. */
export interface RunHeader {
  readonly run: string;
  readonly state: RunState;
  readonly position?: number | null;
  readonly prompts?: readonly Prompt[];
  readonly sampling?: Partial<Sampling>;
  readonly capture?: Partial<Capture>;
  readonly tokens?: number;
  /** Recipe that perturbs the run; null: the model as it is. */
  readonly perturbation?: { readonly digest: string; readonly recipe: unknown } | null;
  readonly error?: { readonly code: string; readonly message: string; readonly hint: string } | null;
  readonly startedAt?: number | string | null;
  readonly tokensPerSecond?: number | null;
}

/** One line of the list of runs. */
export interface RunSummary {
  readonly run: string;
  readonly state: RunState;
  readonly prompts?: readonly (string | Prompt)[] | number;
  /** Digest of the recipe that perturbs the run. */
  readonly perturbation?: string | null | RunHeader["perturbation"];
  readonly startedAt?: number | string | null;
}

export type Readiness = "ready" | "restarting" | "gone";

/** From the first to before the end. */
export type Span = readonly [number, number];

/** Part of the model that a rank has, as it reported itself. */
export interface RankShare {
  readonly rank: number;
  readonly stage: number;
  readonly tensor: number;
  readonly layers: Span;
  readonly heads: Span;
}

export interface Layout {
  readonly tensor: number;
  readonly pipeline: number;
  /** Of one replica; absent until all ranks have reported, and in old recordings. */
  readonly ranks?: readonly RankShare[] | null;
}

export interface Hello {
  readonly protocol: number;
  /** Identifies a start of the hub: after a restart frames are numbered from 1 again. Absent from old hubs. */
  readonly boot?: string | null;
  readonly role: "viewer" | "controller";
  readonly job: string;
  readonly source: "live" | "replay";
  readonly state: Readiness;
  readonly model: Model;
  readonly layout: Layout;
  readonly limits: Limits;
  readonly presets: unknown;
  readonly reducers: unknown;
  /** Names of all sites, those of plugins included; absent from old hubs. */
  readonly sites?: readonly string[];
  /** Recipes that requests can name; absent from old hubs. */
  readonly perturbations?: readonly NamedPerturbation[];
  readonly runs: readonly RunSummary[];
}

/** The hub's answer while no rank has started. */
export type EarlyHello = Omit<Hello, "model"> & { readonly model: Model | null };

export const hasModel = (hello: EarlyHello): hello is Hello => hello.model !== null;

export interface StepHeader {
  readonly seq?: number;
  readonly run: string;
  readonly step: number;
  readonly rows: readonly (readonly [number, number])[];
  readonly ids: readonly number[];
  readonly texts: readonly string[];
  readonly offsets?: readonly Offset[];
  readonly finished?: readonly (string | null)[];
  /** Of each candidate, in the order of `top.id`. */
  readonly topTexts?: readonly (readonly string[])[];
  readonly pcaVersion?: number;
}

export interface OverviewHeader {
  readonly run: string;
  readonly sample: number;
  /** Absent from scores of the prompt, which all its tokens but the first have. */
  readonly stride?: number;
  /** Of each candidate, in the order of `top.id`. */
  readonly topTexts?: readonly (readonly string[])[];
  /** Of the basis that the coordinates were taken in. */
  readonly pcaVersion?: number;
}

export interface RowsHeader {
  readonly run: string;
  readonly step: number;
  readonly rows: readonly (readonly [number, number, number, number])[];
  readonly keys: readonly number[];
}

export interface Gap {
  readonly run?: string;
  readonly what: "step" | "rows" | "overview" | "ranks";
  readonly from: number | null;
  readonly to: number | null;
  readonly ranks?: readonly number[] | null;
  readonly reason: "slow" | "late" | "restart" | "old" | "large";
}

export interface AxesSource {
  readonly run: string;
  /** Of its texts. */
  readonly tokens: number;
}

export interface PcaHeader {
  readonly run: string;
  readonly version: number;
  readonly layers: readonly number[];
  /** Share of the variance of the tokens that the axes were fitted on, [layer][component]. */
  readonly explained: readonly (readonly number[])[];
  readonly fitted: string;
  /** For each layer what the axes were fitted on; absent in old recordings. */
  readonly sources?: readonly AxesSource[];
  readonly rows: readonly (readonly [number, number])[];
}

export interface ScopeStatus {
  readonly state: Readiness;
  readonly message?: string;
  readonly hint?: string;
  readonly queue?: number;
  readonly layout?: Layout;
}

/** True if a run has not ended. */
export const isActive = (state: RunState): boolean =>
  state === "queued" || state === "prefill" || state === "decoding";
