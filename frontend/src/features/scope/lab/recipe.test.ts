import { beforeEach, describe, expect, it } from "vitest";
import {
  actionsOf,
  AFTER,
  axesOf,
  changeOf,
  changeText,
  LAYER,
  numbersIn,
  positionsIn,
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
  value: -1,
  bits: "sign",
  rate: 0.01,
  source: "The whale swims through the sea",
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
    expect(templateOf(changeOf({ ...DRAFT, first: 1 }), "strengths")).toHaveProperty("positions");
    expect(Object.keys(templateOf(changeOf({ ...DRAFT, first: 1 }), "positions"))).toEqual([
      "kind",
      "site",
      "heads",
      "action",
    ]);
  });

  it("has the fields of its action, and the axes that a sweep can vary", () => {
    const cases: [ChangeDraft["action"], string, object, string, string[]][] = [
      ["mean", "mlp2", { type: "mean", over: "prompt" }, "mean over the prompt", []],
      ["value", "mlp2", { type: "mean", value: -1 }, "mean -1, at chosen positions", ["positions"]],
      [
        "patch",
        "residual",
        { type: "patch", source: { prompt: DRAFT.source } },
        "patch from “The whale swims through …”, at chosen positions",
        ["positions"],
      ],
      [
        "bitFlip",
        "mlp.linear_fc1",
        { type: "bitFlip", bits: "sign", rate: 0.01 },
        "bitFlip sign 0.01",
        ["strengths"],
      ],
      [
        "uniform",
        "system",
        { type: "uniform", coefficient: 0.5 },
        "uniform 0.5, at chosen positions",
        ["strengths", "positions"],
      ],
    ];
    for (const [action, id, written, text, axes] of cases) {
      const change = changeOf({ ...DRAFT, spot: spot(id), action, first: 2 });
      expect(change["action"]).toEqual(written);
      expect(changeText(change)).toContain(`: ${text}`);
      expect(axesOf(change)).toEqual(axes);
      expect(actionsOf(spot(id)).map(({ value }) => value)).toContain(action);
    }
    expect(axesOf(changeOf({ ...DRAFT, spot: spot("final_norm") }))).toEqual([]);
    expect(axesOf(null)).toEqual([]);
    expect(actionsOf(spot("logits")).map(({ value }) => value)).not.toContain("patch");
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
    expect(positionsIn("0-2, 5")).toEqual([0, 1, 2, 5]);
    for (const wrong of ["", "3-1", "0-2, x", "-1", "1.5"])
      expect(() => positionsIn(wrong)).toThrow("Write positions");
  });
});
