/** Recipes of perturbations that the lab builds, as docs/perturbation.md has them. */
import type { Model } from "../../../scope/protocol";

/** A place of the drawing: a site of activations, the border after a layer, or parameters. */
export interface Spot {
  readonly id: string;
  readonly label: string;
  readonly kind: "calculation" | "system" | "storage";
  readonly layered: boolean;
  /** Which heads it has. */
  readonly heads?: "heads" | "keyHeads";
}

const site = (id: string, label: string, layered = true, heads?: "heads" | "keyHeads"): Spot => ({
  id,
  label,
  kind: "calculation",
  layered,
  ...(heads ? { heads } : {}),
});
const weights = (id: string, label: string, layered = true): Spot => ({
  id,
  label,
  kind: "storage",
  layered,
});

export const BEFORE: readonly Spot[] = [
  weights("embedding.word_embeddings", "Embedding weights", false),
  site("embedding", "Embedding", false),
];
export const LAYER: readonly Spot[] = [
  weights("self_attention.linear_qkv", "QKV weights"),
  site("q", "Queries", true, "heads"),
  site("k", "Keys", true, "keyHeads"),
  site("head_output", "Head outputs", true, "heads"),
  weights("self_attention.linear_proj", "Projection weights"),
  site("attention_output", "Attention output"),
  site("mlp_in", "MLP input"),
  weights("mlp.linear_fc1", "MLP 1 weights"),
  site("mlp1", "MLP 1"),
  weights("mlp.linear_fc2", "MLP 2 weights"),
  site("mlp2", "MLP 2"),
  site("residual", "Hidden state"),
  { id: "system", label: "After the layer", kind: "system", layered: true },
];
export const AFTER: readonly Spot[] = [
  site("final_norm", "Final norm", false),
  site("logits", "Logits", false),
];

/** Actions of the form; `mean` is over the prompt, `value` a mean that is one number. */
export type ActionName = "gaussian" | "uniform" | "zero" | "mean" | "value" | "patch" | "bitFlip";
interface ActionChoice {
  readonly value: ActionName;
  readonly label: string;
  /** Kinds that have it; absent: all. */
  readonly of?: readonly Spot["kind"][];
}
const ACTIONS: readonly ActionChoice[] = [
  { value: "gaussian", label: "Add noise, N(0, c²)" },
  { value: "uniform", label: "Multiply, U(1 − c, 1 + c)" },
  { value: "zero", label: "Set to zero", of: ["calculation", "storage"] },
  { value: "mean", label: "Set to the mean over the prompt", of: ["calculation"] },
  { value: "value", label: "Set to a number", of: ["calculation"] },
  { value: "patch", label: "Patch from another prompt", of: ["calculation"] },
  { value: "bitFlip", label: "Flip bits", of: ["storage"] },
];
/** Logits are computed at the prompt's last token alone, so they are not patched. */
export const actionsOf = ({ kind, id }: Spot) =>
  ACTIONS.filter(({ value, of }) => (of?.includes(kind) ?? true) && !(value === "patch" && id === "logits"));
export const BITS = ["sign", "exponent", "mantissa"] as const;

/** The fields of the builder; empty lists mean all. */
export interface ChangeDraft {
  spot: Spot;
  layers: number[];
  heads: number[];
  action: ActionName;
  coefficient: number;
  /** Number that replaces all others. */
  value: number;
  bits: (typeof BITS)[number];
  /** Probability of a flip. */
  rate: number;
  /** Prompt that a patch takes activations of. */
  source: string;
  /** Positions in the prompt; null: all tokens. */
  first: number | null;
  end: number | null;
}
export type Change = Readonly<Record<string, unknown>>;
export interface Recipe {
  readonly seed: number;
  readonly perturbations: readonly Change[];
}

const ascending = (numbers: readonly number[]): number[] => [...numbers].sort((a, b) => a - b);

/** A mean over the prompt is known from its last token on, and parameters have no positions. */
export const hasPositions = ({ spot, action }: ChangeDraft): boolean =>
  spot.kind !== "storage" && action !== "mean";

/** Which layers, heads and positions; what is not limited is absent. */
function limits(draft: ChangeDraft): Change {
  const { spot, layers, heads, first, end } = draft;
  const found: Record<string, unknown> = {};
  if (spot.layered && layers.length > 0) found["layers"] = ascending(layers);
  if (spot.heads && heads.length > 0) found["heads"] = ascending(heads);
  if (hasPositions(draft) && (first !== null || end !== null))
    found["positions"] = [{ origin: "start", first: first ?? 0, ...(end === null ? {} : { end }) }];
  return found;
}

function actionOf({ action, coefficient, value, bits, rate, source }: ChangeDraft): Change {
  if (action === "zero") return { type: action };
  if (action === "mean") return { type: action, over: "prompt" };
  if (action === "value") return { type: "mean", value };
  if (action === "patch") return { type: action, source: { prompt: source } };
  return { type: action, ...(action === "bitFlip" ? { bits, rate } : { coefficient }) };
}

/** A change without fields that are at their defaults: equal recipes look equal. */
export function changeOf(draft: ChangeDraft): Change {
  const { spot } = draft;
  const name = { calculation: "site", storage: "parameter", system: null }[spot.kind];
  return {
    kind: spot.kind,
    ...(name === null ? {} : { [name]: spot.id }),
    ...limits(draft),
    action: actionOf(draft),
  };
}

const listed = (name: string, given: unknown): string =>
  Array.isArray(given) ? ` ${name}${given.length > 1 ? "s" : ""} ${given.join(", ")}` : "";

const LONGEST_TEXT = 24;
function amountText({ coefficient, bits, rate, value, values, over, source }: Change): string {
  const { prompt, tokens = [] } = (source ?? {}) as { prompt?: string; tokens?: number[] };
  const short = prompt && prompt.length > LONGEST_TEXT ? `${prompt.slice(0, LONGEST_TEXT)}…` : prompt;
  const taken = short === undefined ? `${tokens.length} tokens` : `“${short}”`;
  const given = Array.isArray(values) ? `${values.length} numbers` : value;
  const words = [source && `from ${taken}`, over && "over the prompt", bits, given, coefficient ?? rate];
  return words.map((word) => (word === undefined ? "" : ` ${String(word)}`)).join("");
}

/** A change in words; those that were imported may have fields that the lab does not build. */
export function changeText(change: Change): string {
  const action = (change["action"] ?? {}) as Readonly<Record<string, unknown>>;
  const where = change["site"] ?? change["parameter"] ?? "after layers";
  const places = change["positions"] === undefined ? "" : ", at chosen positions";
  return `${String(where)}${listed("layer", change["layers"])}${listed("head", change["heads"])}: ${String(action["type"])}${amountText(action)}${places}`;
}

/** Reads a recipe from JSON. Throws Error, which says what is wrong. */
export function readRecipe(text: string): Recipe {
  const given: unknown = JSON.parse(text);
  const { perturbations, seed = 0 } = (given ?? {}) as Partial<Recipe>;
  if (!Array.isArray(perturbations) || perturbations.length === 0)
    throw new Error('A recipe has a list of changes; write {"seed": 0, "perturbations": [...]}.');
  return { ...(given as object), seed, perturbations: perturbations as Change[] };
}

export type Axis = "strengths" | "positions";

/** What a sweep over layers can vary besides; none of a change that has no layers, and of no change. */
export function axesOf(change: Change | null): Axis[] {
  if (!change) return [];
  const action = (change["action"] ?? {}) as Change;
  const named = change["site"] ?? change["parameter"];
  if ([...BEFORE, ...AFTER].some(({ id }) => id === named)) return [];
  return [
    ...("coefficient" in action || "rate" in action ? (["strengths"] as const) : []),
    ...(change["kind"] === "storage" || "over" in action ? [] : (["positions"] as const)),
  ];
}

/** A change without what the axes of a sweep give. */
export function templateOf(change: Change, axis: Axis): Change {
  const given = axis === "positions" ? ["layers", axis] : ["layers"];
  return Object.fromEntries(Object.entries(change).filter(([name]) => !given.includes(name)));
}

/** Numbers in a text, separated by commas or spaces. Throws Error for anything else. */
export function numbersIn(text: string): number[] {
  const words = text.split(/[\s,]+/).filter((word) => word !== "");
  const found = words.map(Number);
  if (found.length === 0 || found.some((value) => !Number.isFinite(value) || value < 0))
    throw new Error("Write numbers from 0 on, separated by commas: 0.1, 0.3, 1.");
  return found;
}

/** Most values of an axis of a sweep. */
const MOST_VALUES = 256;
const POSITIONS = "Write positions of the prompt, from 0 on: 0-3, 8.";
/** Positions in a text, such as 0-3, 8. Throws Error for anything else. */
export function positionsIn(text: string): number[] {
  const parts = text.split(/[\s,]+/).filter((part) => part !== "");
  const found = parts.flatMap((part) => {
    const [, first, last] = /^(\d+)(?:-(\d+))?$/.exec(part) ?? [];
    const [from, to] = [Number(first), Number(last ?? first)];
    if (!(to >= from)) throw new Error(POSITIONS);
    return Array.from({ length: Math.min(to - from, MOST_VALUES) + 1 }, (_, at) => from + at);
  });
  if (found.length === 0) throw new Error(POSITIONS);
  return found;
}

export const headsOf = (spot: Spot, model: Model): number => (spot.heads ? model[spot.heads] : 0);
