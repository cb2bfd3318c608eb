import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { describe, expect, it } from "vitest";
import { Flag, GROUPS, Kind, kindStyle, PassFlag } from "./kinds";

describe("kinds", () => {
  it("are numbered as in Python", () => {
    const source = readFileSync(
      resolve(import.meta.dirname, "../../../common/src/megatronapp_common/trace.py"),
      "utf8",
    );
    const enumOf = (name: string): Record<string, number> => {
      const body = source.split(`class ${name}(`)[1]?.split("\nclass ")[0] ?? "";
      return Object.fromEntries(
        [...body.matchAll(/^ {4}([A-Z_]+) = (\d+)$/gm)].map(([, key, value]) => [key, Number(value)]),
      );
    };
    expect(enumOf("RecordKind")).toEqual(Kind);
    expect(enumOf("Flag")).toEqual(Flag);
    expect(enumOf("PassFlag")).toEqual(PassFlag);
  });

  it("all have a name and a colour, known or not", () => {
    for (const kind of [...Object.values(Kind).filter((number) => number < 32), 99]) {
      const { label, group } = kindStyle(kind);
      expect(label).not.toBe("");
      expect(GROUPS[group].colour.dark).toMatch(/^#/);
    }
    expect(kindStyle(99).label).toBe("Kind 99");
  });
});
