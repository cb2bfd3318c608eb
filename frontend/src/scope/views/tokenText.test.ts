import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { SampleStore } from "../store/sampleStore";
import { candidateName, labelText, pieces, spokenText, visibleText } from "./tokenText";

describe("texts of tokens", () => {
  const sample = new SampleStore();
  sample.setPrompt({
    text: "né 👋 한",
    ids: [1, 2, 3, 4, 5, 6, 7],
    offsets: [[0, 1], [1, 2], [2, 3], null, null, [3, 5], [5, 7]],
  });
  sample.setToken(7, 8, "\n", null);
  sample.setToken(8, 9, " ok", null);

  it("tells a character of several tokens once, with its last one", () => {
    expect(pieces(sample).map((piece) => piece.label)).toEqual([
      "n",
      "é",
      "␣",
      "…",
      "…",
      "👋",
      "␣한",
      "↵",
      "␣ok",
    ]);
    expect(pieces(sample).filter((piece) => piece.partial).length).toBe(2);
  });

  it("tells tokens apart that differ in a leading space, in every form of their name", () => {
    const code = new SampleStore();
    code.setPrompt({ text: "self self", ids: [279, 291], offsets: [[0, 4], [4, 9]] }); // prettier-ignore
    const [bare, spaced] = pieces(code);
    expect([bare?.label, bare?.name, bare?.spoken]).toEqual(["self", "“self”", "“self”"]);
    expect([spaced?.label, spaced?.name, spaced?.spoken]).toEqual(["␣self", "“␣self”", "space “self”"]);
  });

  it("counts long runs of spaces on axes, and says white space in words", () => {
    expect(labelText("\n       ")).toBe("↵␣₇");
    expect(labelText("            x")).toBe("␣₁₂x");
    expect(labelText("   x")).toBe("␣␣␣x");
    expect(labelText("␣␣␣␣")).toBe("␣␣␣␣");
    expect(spokenText("\n       ")).toBe("line end, 7 spaces");
    expect(spokenText("\t\tfoo bar\n")).toBe("2 tabs “foo bar” line end");
  });

  it("names candidates by their text alone, and pieces of characters as such", () => {
    expect(candidateName(5, " the")).toBe("␣the");
    expect(candidateName(6, "\ufffd")).toBe("part of a character (token 6)");
    expect(candidateName(7, undefined)).toBe("token 7");
  });

  it("knows what was generated", () => {
    expect(pieces(sample, 6).map((piece) => piece.generated)).toEqual([false, true, true]);
  });

  it("loses nothing of a text but shows spaces at its ends and control signs", () => {
    expect(visibleText("  a b ")).toBe("␣␣a b␣");
    expect(visibleText("\t\n\u0000")).toBe("⇥↵␀");
    fc.assert(fc.property(fc.string(), (text) => visibleText(text).length === text.length));
  });
});
