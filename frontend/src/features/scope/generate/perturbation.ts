/** Choice of a perturbation in the form, and the field of the request that it becomes. */
import type { NamedPerturbation, RunHeader } from "../../../scope/protocol";

export const SERVER_DEFAULT = "";
export const NONE = "none";
export const OWN_RECIPE = "{}";

/** `choice`: a constant above, or the name of a recipe of the server; `text`: JSON of a recipe. */
export interface PerturbationDraft {
  choice: string;
  text: string;
}

export const EXAMPLE = JSON.stringify(
  {
    seed: 0,
    perturbations: [
      {
        kind: "calculation",
        site: "mlp2",
        layers: [0],
        action: { type: "gaussian", coefficient: 0.1 },
      },
    ],
  },
  null,
  2,
);

export interface PerturbationOption {
  readonly value: string;
  readonly label: string;
}

export function perturbationOptions(named: readonly NamedPerturbation[]): PerturbationOption[] {
  const active = named.find((recipe) => recipe.active);
  return [
    {
      value: SERVER_DEFAULT,
      label: active ? `Active recipe of the server: ${active.name}` : "None: the model as it is",
    },
    ...(active ? [{ value: NONE, label: "None: the model as it is" }] : []),
    ...named.filter((recipe) => recipe !== active).map(({ name }) => ({ value: name, label: name })),
    { value: OWN_RECIPE, label: "Recipe in JSON" },
  ];
}

/** Why the text is no JSON; null: it is. */
export function jsonProblem({ choice, text }: PerturbationDraft): string | null {
  if (choice !== OWN_RECIPE) return null;
  try {
    JSON.parse(text);
    return null;
  } catch (error) {
    return `This is not JSON: ${error instanceof Error ? error.message : String(error)}`;
  }
}

/** Field of a request; empty for the default of the server. */
export function perturbationField({ choice, text }: PerturbationDraft): { perturbation?: unknown } {
  if (choice === SERVER_DEFAULT) return {};
  return { perturbation: choice === OWN_RECIPE ? JSON.parse(text) : choice };
}

/** The choice that repeats a run. */
export function draftOf({ perturbation }: Pick<RunHeader, "perturbation">): PerturbationDraft {
  if (!perturbation) return { choice: perturbation === null ? NONE : SERVER_DEFAULT, text: EXAMPLE };
  return { choice: OWN_RECIPE, text: JSON.stringify(perturbation.recipe, null, 2) };
}
