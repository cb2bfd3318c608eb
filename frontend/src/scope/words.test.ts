import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { ApiError } from "../api/client";
import { emptyWords, refusalWords, type Surroundings } from "../features/scope/panelWords";
import { settingsOf } from "../composables/useRunForm";
import { captureText, samplingText } from "../features/scope/settings";
import { backText, gapText } from "../features/scope/texts";
import { formatSelection, NOTHING, parseSelection } from "../store/selection";
import { nearestHead, ownerOf, shards, shardTitle } from "./layout";
import { DEFAULT_CAPTURE, type Gap } from "./protocol";

describe("ranks", () => {
  const sizes = fc.record({
    tensor: fc.constantFrom(1, 2, 4),
    pipeline: fc.constantFrom(1, 2, 3),
    layers: fc.integer({ min: 3, max: 40 }),
    heads: fc.constantFrom(4, 8, 12),
  });

  it("hold the layers that they said, however uneven", () => {
    const said = [
      { rank: 0, stage: 0, tensor: 0, layers: [0, 1], heads: [0, 4] },
      { rank: 4, stage: 1, tensor: 0, layers: [1, 8], heads: [0, 4] },
    ] as const;
    const all = shards({ layers: 8, heads: 4 }, { tensor: 1, pipeline: 2, ranks: said });
    expect([0, 1, 3, 7].map((layer) => ownerOf(all, { layer, head: 0 })?.rank)).toEqual([0, 4, 4, 4]);
    expect(shardTitle(all[1] as (typeof all)[0])).toContain("layers 1 to 7");
  });

  it("share layers and heads without a hole, and each head has one owner", () => {
    fc.assert(
      fc.property(sizes, fc.nat(), fc.nat(), (size, a, b) => {
        const all = shards(size, size);
        const at = { layer: a % size.layers, head: b % size.heads };
        const held = all.filter(
          ({ layers, heads }) =>
            at.layer >= layers[0] && at.layer < layers[1] && at.head >= heads[0] && at.head < heads[1],
        );
        expect(held.length).toBe(1);
        expect(ownerOf(all, at)).toBe(held[0]);
        for (const one of all) expect(ownerOf(all, nearestHead(one, at))).toBe(one);
      }),
    );
  });

  it("count tensor first, and say what they hold", () => {
    const all = shards({ layers: 4, heads: 4 }, { tensor: 2, pipeline: 2 });
    expect(all.map(shardTitle)).toEqual([
      "0: layers 0 to 1, heads 0 to 1",
      "1: layers 0 to 1, heads 2 to 3",
      "2: layers 2 to 3, heads 0 to 1",
      "3: layers 2 to 3, heads 2 to 3",
    ]);
    const one = shards({ layers: 1, heads: 1 }, { tensor: 1, pipeline: 1, ranks: null });
    expect(one.map(shardTitle)).toEqual(["0: layer 0, head 0"]);
  });

  it("stay in the address", () => {
    const selection = { ...NOTHING, page: "scope", rank: 3, layer: 2, head: 1 } as const;
    expect(parseSelection(formatSelection(selection))).toEqual(selection);
  });
});

describe("words of an empty panel", () => {
  const usual = { title: "No basis yet", hint: "It comes." };
  const around = (change: Partial<Surroundings>): Surroundings => ({
    header: { state: "decoding", capture: DEFAULT_CAPTURE },
    connected: true,
    readiness: "ready",
    ...change,
  });
  const error = { code: "engine-lost", message: "Rank 2 is gone.", hint: "The gang starts again." };

  it("tell what a failed run died of", () => {
    const words = emptyWords(around({ header: { state: "failed", error } }), ["pca"], usual);
    expect(words).toMatchObject({ kind: "error", hint: "Rank 2 is gone. The gang starts again." });
  });

  it("tell a lost connection, ranks that restart, a stopped run, and what is switched off", () => {
    const title = (change: Partial<Surroundings>): string => emptyWords(around(change), ["pca"], usual).title;
    expect(title({ connected: false })).toContain("connection to the hub is lost");
    expect(title({ readiness: "restarting" })).toBe("The ranks restart");
    expect(title({ header: { state: "cancelled" } })).toContain("stopped");
    const off = { ...DEFAULT_CAPTURE, states: { ...DEFAULT_CAPTURE.states, pca: false } };
    expect(title({ header: { state: "done", capture: off } })).toBe("This run does not look at PCA");
    expect(title({ header: { state: "done", capture: { preset: "off" } } })).toContain("candidates only");
    expect(title({})).toBe("No basis yet");
  });

  it("wait while a prompt is read", () => {
    expect(emptyWords(around({ header: { state: "prefill" } }), ["pca"], usual).kind).toBe("loading");
  });
});

describe("words of a refusal", () => {
  const refused = (status: number, code: string, retry: number | null = null): ApiError =>
    new ApiError(status, "said by the hub", "with a hint.", { code }, retry);

  it("tell a run that the hub lost, what was not recorded, and when the page asks again", () => {
    const words = (error: ApiError, replay = false) =>
      refusalWords(error, replay, error.retryAfterS !== null);
    expect(words(refused(404, "no-such-run"))).toMatchObject({ kind: "empty", again: false });
    expect(words(refused(404, "not-recorded"), true).title).toBe("This was not recorded");
    expect(words(refused(404, "outside"))).toMatchObject({ title: "said by the hub", again: false });
    expect(words(refused(429, "too-many", 7))).toMatchObject({
      kind: "error",
      hint: "with a hint. The page asks again in 7 s.",
    });
    expect(words(refused(503, "probe-incomplete"))).toMatchObject({ title: "said by the hub", again: true });
    expect(words(refused(409, "run-incomplete"))).toMatchObject({ kind: "empty", again: false });
    expect(refusalWords(refused(503, "probe-incomplete", 1), false, false).hint).toBe("with a hint.");
  });
});

describe("words after a reconnect", () => {
  const gap: Gap = { what: "step", from: 3, to: 5, reason: "restart" };

  it("say what was missed, or that nothing was", () => {
    for (const restarted of [false, null]) {
      const back = { seconds: 4, known: true, restarted };
      expect(backText(back, []).hint).toBe("Nothing was missed.");
      expect(backText(back, [gap]).hint).toBe(gapText([gap])?.title);
      expect(backText(back, [gap]).hint).toContain("3 steps were skipped");
    }
    const again = { seconds: 4, known: true, restarted: true };
    expect(backText(again, []).hint).toContain("was restarted; numbers from before");
    expect(backText(again, [gap]).hint).toContain("3 steps were skipped");
    for (const restarted of [true, null])
      expect(backText({ ...again, known: false, restarted }, []).hint).toContain("no longer knows this run");
    expect(backText({ ...again, known: false, restarted: false }, []).hint).toContain(
      "keeps its newest runs",
    );
  });
});

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
    expect(draft).toEqual({ prompts: ["a b"], tokens: 60, sampling, capture: header.capture });
    draft.capture.pinned.pop();
    draft.sampling.stop.pop();
    expect(header.capture.pinned.length + sampling.stop.length).toBe(2);
  });
});

describe("what was skipped", () => {
  it.each([
    ["step", "1 step was skipped"],
    ["rows", "1 row of pinned heads was skipped"],
    ["overview", "1 overview was skipped"],
    ["ranks", "1 step of some ranks was skipped"],
  ] as const)("is named in the singular: %s", (what, words) => {
    expect(gapText([{ what, from: 3, to: 3, reason: "slow" }])?.title).toContain(words);
  });
});
