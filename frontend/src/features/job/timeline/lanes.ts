/** Where lanes and spans are in a picture of a step. CSS pixels. Pure. */
import type { Box } from "../../../render/surface";
import type { Scale } from "../../../render/viewport";
import { trackOf, type SpanView } from "../../../trace/timeline";

export const AXIS_TOP = 24;
export const LANES_HEIGHT = 560;

export const laneHeight = (lanes: number): number =>
  Math.min(42, Math.max(6, Math.floor(LANES_HEIGHT / Math.max(lanes, 1))));

/** Height of all lanes with the axis: that of the picture, up to `MOST_HEIGHT`, beyond which it scrolls. */
export const timelineHeight = (lanes: number): number => AXIS_TOP + laneHeight(lanes) * lanes + 4;

export const MOST_HEIGHT = AXIS_TOP + LANES_HEIGHT + 4;

/** The lane under a pixel, which may lie outside of all. */
export const laneAt = (y: number, lanes: number, scroll = 0): number =>
  y < AXIS_TOP ? -1 : Math.floor((y - AXIS_TOP + scroll) / laneHeight(lanes));

/** Lanes that a picture of this height shows, the last one excluded. */
export function lanesIn(lanes: number, scroll: number, height: number): { first: number; end: number } {
  const size = laneHeight(lanes);
  return {
    first: Math.max(0, Math.floor(scroll / size)),
    end: Math.min(lanes, Math.ceil((scroll + height - AXIS_TOP) / size)),
  };
}

/** Box of a span in its lane: main spans fill it, steps, layers and faults are strips at its edges. */
export function spanBox(span: SpanView, lane: number, lanes: number, scale: Scale, scroll = 0): Box {
  const size = laneHeight(lanes);
  const top = AXIS_TOP + lane * size - scroll;
  const x = scale.toPixel(span.startNs);
  const width = Math.max(scale.toPixel(span.endNs) - x, 1);
  const inset = size >= 16 ? 4 : 1;
  switch (trackOf(span.kind)) {
    case "frame":
      return { x, y: top + 1, width, height: Math.min(2, inset) };
    case "fault":
      return { x, y: top + size - inset - 1, width, height: inset };
    case "copy":
      return { x, y: top + size - Math.max(inset / 2, 1), width, height: Math.max(inset / 2, 1) };
    case "layer":
      return { x, y: top + size - inset - size * 0.25, width, height: size * 0.2 };
    default:
      return { x, y: top + inset, width, height: size - 2 * inset };
  }
}
