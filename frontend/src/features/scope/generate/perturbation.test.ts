import { describe, expect, it } from "vitest";
import {
  EXAMPLE,
  NONE,
  OWN_RECIPE,
  SERVER_DEFAULT,
  draftOf,
  jsonProblem,
  perturbationField,
  perturbationOptions,
} from "./perturbation";

describe("the perturbation of a form", () => {
  const recipe = { version: 1, perturbations: [{ kind: "system" }] };

  it("offers the recipes of the server, and the model as it is", () => {
    const shift = { name: "shift", digest: "0123456789ab", active: true };
    expect(perturbationOptions([]).map(({ value }) => value)).toEqual([SERVER_DEFAULT, OWN_RECIPE]);
    expect(perturbationOptions([shift, { ...shift, name: "zero", active: false }])).toEqual([
      { value: SERVER_DEFAULT, label: "Active recipe of the server: shift" },
      { value: NONE, label: "None: the model as it is" },
      { value: "zero", label: "zero" },
      { value: OWN_RECIPE, label: "Recipe in JSON" },
    ]);
  });

  it("becomes a field of the request", () => {
    expect(perturbationField({ choice: SERVER_DEFAULT, text: EXAMPLE })).toEqual({});
    expect(perturbationField({ choice: NONE, text: EXAMPLE })).toEqual({ perturbation: "none" });
    expect(perturbationField({ choice: OWN_RECIPE, text: "{}" })).toEqual({ perturbation: {} });
  });

  it("says where a text is no JSON", () => {
    expect(jsonProblem({ choice: OWN_RECIPE, text: '{"seed": }' })).toContain("This is not JSON: ");
    expect(jsonProblem({ choice: OWN_RECIPE, text: EXAMPLE })).toBe(null);
    expect(jsonProblem({ choice: "shift", text: "{" })).toBe(null);
  });

  it("repeats a run", () => {
    const draft = draftOf({ perturbation: { digest: "0123456789ab", recipe } });
    expect(perturbationField(draft)).toEqual({ perturbation: recipe });
    expect(perturbationField(draftOf({ perturbation: null }))).toEqual({ perturbation: NONE });
  });
});
