import { describe, expect, it } from "vitest";
import { backText, gapText } from "./texts";
import { type Gap } from "../../scope/protocol";

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
    expect(backText(again, []).hint).toContain("was restarted; earlier values");
    expect(backText(again, [gap]).hint).toContain("3 steps were skipped");
    for (const restarted of [true, null])
      expect(backText({ ...again, known: false, restarted }, []).hint).toContain("no longer knows this run");
    expect(backText({ ...again, known: false, restarted: false }, []).hint).toContain(
      "keeps its newest runs",
    );
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
