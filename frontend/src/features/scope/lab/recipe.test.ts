import { beforeEach, describe, expect, it } from "vitest";
import {
  AFTER,
  changeOf,
  changeText,
  LAYER,
  numbersIn,
  readRecipe,
  templateOf,
  type ChangeDraft,
} from "./recipe";
import { loadRecipes, storeRecipes } from "./savedRecipes";

const spot = (id: string) => [...LAYER, ...AFTER].find((one) => one.id === id) as ChangeDraft["spot"];
const DRAFT: ChangeDraft = {
  spot: spot("q"),
  layers: [2, 0],
  heads: [1],
  action: "gaussian",
  coefficient: 0.5,
  first: null,
  end: null,
};

describe("a change", () => {
  it("names only what its place has", () => {
    const action = { type: "gaussian", coefficient: 0.5 };
    expect(changeOf(DRAFT)).toEqual({ kind: "calculation", site: "q", layers: [0, 2], heads: [1], action });
    expect(changeOf({ ...DRAFT, spot: spot("final_norm") })).toEqual({
      kind: "calculation",
      site: "final_norm",
      action,
    });
    expect(changeOf({ ...DRAFT, spot: spot("mlp.linear_fc1"), first: 1, action: "zero" })).toEqual({
      kind: "storage",
      parameter: "mlp.linear_fc1",
      layers: [0, 2],
      action: { type: "zero" },
    });
    expect(changeOf({ ...DRAFT, spot: spot("system"), layers: [], end: 3 })).toEqual({
      kind: "system",
      positions: [{ origin: "start", first: 0, end: 3 }],
      action,
    });
  });

  it("is described, and without its layers the template of a sweep", () => {
    expect(changeText(changeOf(DRAFT))).toBe("q layers 0, 2 head 1: gaussian 0.5");
    expect(templateOf(changeOf(DRAFT))).not.toHaveProperty("layers");
  });
});

describe("recipes", () => {
  beforeEach(() => localStorage.clear());

  it("come back from files and from the browser, and others are refused", () => {
    const recipe = { seed: 3, perturbations: [changeOf(DRAFT)] };
    expect(readRecipe(JSON.stringify(recipe))).toEqual(recipe);
    storeRecipes({ mine: recipe });
    expect(loadRecipes()).toEqual({ mine: recipe });
    expect(() => readRecipe('{"seed": 1}')).toThrow("A recipe has a list of changes");
    localStorage.setItem("megatronapp-scope-recipes", "{broken");
    expect(loadRecipes()).toEqual({});
  });

  it("are swept over numbers", () => {
    expect(numbersIn("0.1, 0.3 1")).toEqual([0.1, 0.3, 1]);
    expect(() => numbersIn("0.1, x")).toThrow("Write numbers");
    expect(() => numbersIn(" ")).toThrow("Write numbers");
  });
});
