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

export type ActionName = "gaussian" | "uniform" | "zero";
export const ACTIONS: readonly { readonly value: ActionName; readonly label: string }[] = [
  { value: "gaussian", label: "Add noise, N(0, c²)" },
  { value: "uniform", label: "Multiply, U(1 − c, 1 + c)" },
  { value: "zero", label: "Set to zero" },
];
export const actionsOf = ({ kind }: Spot) =>
  ACTIONS.filter(({ value }) => kind !== "system" || value !== "zero");

/** The fields of the builder; empty lists mean all. */
export interface ChangeDraft {
  spot: Spot;
  layers: number[];
  heads: number[];
  action: ActionName;
  coefficient: number;
  /** Of the prompt; null: all tokens. */
  first: number | null;
  end: number | null;
}
export type Change = Readonly<Record<string, unknown>>;
export interface Recipe {
  readonly seed: number;
  readonly perturbations: readonly Change[];
}

const ascending = (numbers: readonly number[]): number[] => [...numbers].sort((a, b) => a - b);

/** Which layers, heads and positions; what is not limited is absent. */
function limits({ spot, layers, heads, first, end }: ChangeDraft): Change {
  const found: Record<string, unknown> = {};
  if (spot.layered && layers.length > 0) found["layers"] = ascending(layers);
  if (spot.heads && heads.length > 0) found["heads"] = ascending(heads);
  if (spot.kind !== "storage" && (first !== null || end !== null))
    found["positions"] = [{ origin: "start", first: first ?? 0, ...(end === null ? {} : { end }) }];
  return found;
}

/** A change without fields that are at their defaults: equal recipes look equal. */
export function changeOf(draft: ChangeDraft): Change {
  const { spot, action, coefficient } = draft;
  const name = { calculation: "site", storage: "parameter", system: null }[spot.kind];
  return {
    kind: spot.kind,
    ...(name === null ? {} : { [name]: spot.id }),
    ...limits(draft),
    action: action === "zero" ? { type: action } : { type: action, coefficient },
  };
}

const listed = (name: string, given: unknown): string =>
  Array.isArray(given) ? ` ${name}${given.length > 1 ? "s" : ""} ${given.join(", ")}` : "";

/** A change in words; those that were imported may have fields that the lab does not build. */
export function changeText(change: Change): string {
  const action = (change["action"] ?? {}) as Readonly<Record<string, unknown>>;
  const where = change["site"] ?? change["parameter"] ?? "after layers";
  const strength = action["coefficient"] ?? action["rate"];
  const amount = strength === undefined ? "" : ` ${String(strength)}`;
  const places = change["positions"] === undefined ? "" : ", at chosen positions";
  return `${String(where)}${listed("layer", change["layers"])}${listed("head", change["heads"])}: ${String(action["type"])}${amount}${places}`;
}

/** Reads a recipe from JSON. Throws Error, which says what is wrong. */
export function readRecipe(text: string): Recipe {
  const given: unknown = JSON.parse(text);
  const { perturbations, seed = 0 } = (given ?? {}) as Partial<Recipe>;
  if (!Array.isArray(perturbations) || perturbations.length === 0)
    throw new Error('A recipe has a list of changes; write {"seed": 0, "perturbations": [...]}.');
  return { ...(given as object), seed, perturbations: perturbations as Change[] };
}

/** What a sweep varies: the change without its layers, strength and positions of layers. */
export function templateOf(change: Change): Change {
  return Object.fromEntries(Object.entries(change).filter(([name]) => name !== "layers"));
}

/** Numbers in a text, separated by commas or spaces. Throws Error for anything else. */
export function numbersIn(text: string): number[] {
  const words = text.split(/[\s,]+/).filter((word) => word !== "");
  const found = words.map(Number);
  if (found.length === 0 || found.some((value) => !Number.isFinite(value) || value < 0))
    throw new Error("Write numbers from 0 on, separated by commas: 0.1, 0.3, 1.");
  return found;
}

export const headsOf = (spot: Spot, model: Model): number => (spot.heads ? model[spot.heads] : 0);
