import { describe, expect, it } from "vitest";
import { settingsOf } from "./useRunForm";
import { EXAMPLE, SERVER_DEFAULT } from "./perturbation";
import { captureText, samplingText } from "./settings";
import { DEFAULT_CAPTURE } from "../../../scope/protocol";

describe("settings of a run", () => {
  const sampling = { temperature: 0.7, topK: 0, topP: 0.9, seed: 7, stop: ["\n"] };
  const header = {
    run: "ab",
    state: "done",
    prompts: [{ text: "a b", ids: [1], offsets: [] }],
    sampling,
    tokens: 60,
    capture: { ...DEFAULT_CAPTURE, pinned: [{ layer: 1, head: 2 }] },
  } as const;

  it("are said with the seed that it got", () => {
    expect(samplingText(header)).toBe(
      "temperature 0.7, top-p 0.9, seed 7, at most 60 new tokens, stops at “↵”",
    );
    expect(samplingText({ sampling: { temperature: 0, topK: 4, topP: 1, seed: 5 } })).toBe(
      "greedy (temperature 0), seed 5",
    );
    expect(samplingText({})).toBe("");
  });

  it("say of the capture what is not the usual", () => {
    expect(captureText(DEFAULT_CAPTURE)).toBe("");
    expect(captureText(header.capture)).toBe("pinned 1.2");
    const states = { ...DEFAULT_CAPTURE.states, mlp1: false, pca: false };
    expect(captureText({ preset: "lite", states, rotary: "before", pixels: { qkv: 96, mlp: 8 } })).toBe(
      "capture lite, without MLP 1, PCA, Q and K before rotation, 8 pixels of the MLP",
    );
  });

  it("fill the form, whole, and are no part of the run any more", () => {
    const draft = settingsOf(header);
    const perturbation = { choice: SERVER_DEFAULT, text: EXAMPLE };
    expect(draft).toEqual({ prompts: ["a b"], tokens: 60, sampling, capture: header.capture, perturbation });
    draft.capture.pinned.pop();
    draft.sampling.stop.pop();
    expect(header.capture.pinned.length + sampling.stop.length).toBe(2);
  });
});
