import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { boundsAround, covers, type StepLimits, type View } from "./spanWindows";

const STEP: StepLimits = { fromNs: 0, toNs: 1e9, lanes: 10_000 };
const VIEWS = fc
  .record({
    at: fc.double({ min: 0, max: 1, noNaN: true }),
    size: fc.integer({ min: 2000, max: 1e9 }),
    firstLane: fc.integer({ min: 0, max: 9900 }),
    lanes: fc.integer({ min: 1, max: 94 }),
    pixels: fc.integer({ min: 200, max: 6000 }),
  })
  .map(({ at, size, ...view }): View => {
    const fromNs = at * (STEP.toNs - size);
    return { ...view, fromNs, toNs: fromNs + size };
  });
const panned = (view: View, time: number, lanes: number): View => {
  const by = time * (view.toNs - view.fromNs);
  return {
    ...view,
    fromNs: view.fromNs + by,
    toNs: view.toNs + by,
    firstLane: view.firstLane + Math.round(lanes * view.lanes),
  };
};

describe("the part of a large step that is requested", () => {
  it("has what is shown, within the limits of the hub", () => {
    fc.assert(
      fc.property(VIEWS, (view) => {
        const bounds = boundsAround(view, STEP);
        expect(covers(bounds, view, STEP)).toBe(true);
        expect(bounds.pixels).toBeLessThanOrEqual(8192);
        expect(bounds.tracks).toBeLessThanOrEqual(512);
        expect(bounds.toNs).toBeGreaterThan(bounds.fromNs);
        expect(bounds.firstTrack + bounds.tracks).toBeLessThanOrEqual(STEP.lanes);
      }),
    );
  });

  it("has a margin: a small move needs no other part, a large one does", () => {
    const view: View = { fromNs: 4e8, toNs: 5e8, firstLane: 500, lanes: 90, pixels: 1200 };
    const bounds = boundsAround(view, STEP);
    for (const small of [
      panned(view, 0.3, 0),
      panned(view, -0.3, 0),
      panned(view, 0, 0.3),
      panned(view, 0, -0.3),
    ])
      expect(covers(bounds, small, STEP)).toBe(true);
    for (const large of [
      panned(view, 0.6, 0),
      panned(view, -0.6, 0),
      panned(view, 0, 0.6),
      panned(view, 0, -0.6),
    ])
      expect(covers(bounds, large, STEP)).toBe(false);
  });

  it("is replaced by one with more detail after zooming in, and by a wider one after zooming out", () => {
    const view: View = { fromNs: 4e8, toNs: 5e8, firstLane: 0, lanes: 90, pixels: 1200 };
    const bounds = boundsAround(view, STEP);
    expect(covers(bounds, { ...view, fromNs: 4.4e8, toNs: 4.6e8 }, STEP)).toBe(false);
    expect(covers(bounds, { ...view, fromNs: 3e8, toNs: 6e8 }, STEP)).toBe(false);
  });
});
