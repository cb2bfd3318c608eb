import { describe, expect, it } from "vitest";
import { PALETTES } from "../../../render/palette";
import type { Surface } from "../../../render/surface";
import { linear } from "../../../render/viewport";
import { GROUPS, Kind } from "../../../trace/kinds";
import { timelineOf, type Row } from "../../../trace/testTimeline";
import { buildTimeline } from "../../../trace/timeline";
import { drawTimeline } from "./drawTimeline";

interface Drawn {
  readonly texts: string[];
  readonly fills: string[];
}

/** Texts and colours of a step in which rank 0 runs backward passes and all others forward ones. */
function drawn(ranks: number, scroll = 0): Drawn {
  const rows: Row[] = Array.from({ length: ranks }, (_, rank) => [rank, Kind.SEND_POST, null, 0, 100]);
  const source = {
    ...timelineOf(rows),
    roles: rows.map(([rank]) => (rank === 0 ? ("backward" as const) : ("forward" as const))),
    peer: rows.map(([rank]) => (rank === 0 ? 1 : 0)),
  };
  const result: Drawn = { texts: [], fills: [] };
  const nothing = (): void => undefined;
  const surface = {
    width: 600,
    height: 600,
    snap: (value: number) => value,
    rect: (_: unknown, fill: string) => result.fills.push(fill),
    text: (text: string) => result.texts.push(text),
    clipped: (_: unknown, draw: () => void) => draw(),
    hatch: nothing,
    outline: nothing,
    arrow: nothing,
  };
  drawTimeline(surface as unknown as Surface, {
    model: buildTimeline(source),
    view: { from: 0, to: 100 },
    scale: linear({ from: 0, to: 100 }, 66, 588),
    theme: "dark",
    palette: PALETTES.dark,
    suspects: new Set([1]),
    selectedRank: null,
    selectedSpan: null,
    hoveredSpan: null,
    scroll,
  });
  return result;
}

describe("the picture of a step of forward and backward ranks", () => {
  it("has the role of a rank in a line of its own, and an initial where lanes are low", () => {
    const names = ({ texts }: Drawn): string[] => texts.filter((text) => /rank|ward/.test(text));
    expect(names(drawn(3))).toEqual(["▲ rank 1", "forward", "rank 2", "forward", "rank 0", "backward"]);
    const low = names(drawn(32));
    expect(low[0]).toBe("▲ F rank 1");
    expect(low.at(-1)).toBe("B rank 0");
  });

  it("draws only the lanes in view", () => {
    const { texts, fills } = drawn(10_000, 6 * 5000);
    const ranks = texts.filter((text) => text.includes("rank")).map((text) => Number(/\d+$/.exec(text)?.[0]));
    expect(Math.min(...ranks)).toBeGreaterThan(5000 - 1);
    expect(Math.max(...ranks)).toBeLessThan(5000 + 600 / 6 + 1);
    expect(fills.length).toBeLessThan(600);
  });

  it("has a line between the roles, and a colour for shipments", () => {
    const { fills } = drawn(4);
    expect(fills.filter((fill) => fill === PALETTES.dark.border)).toHaveLength(1);
    expect(fills.filter((fill) => fill === GROUPS.shipment.colour.dark)).toHaveLength(3);
    expect(fills.filter((fill) => fill === GROUPS.transfer.colour.dark)).toHaveLength(1);
  });
});
