/** Which part of a large step a picture needs, and which part to request so that panning does not wait. Pure. */
import type { TimelineWindow } from "../../../api/types";

/** What a picture shows now. */
export interface View {
  readonly fromNs: number;
  readonly toNs: number;
  readonly firstLane: number;
  readonly lanes: number;
  /** Width in pixels of the screen. */
  readonly pixels: number;
}

/** A part to request, as the hub takes it. */
export interface WindowBounds {
  readonly fromNs: number;
  readonly toNs: number;
  readonly firstTrack: number;
  readonly tracks: number;
  readonly pixels: number;
}

/** Records of a step that is loaded whole. */
export const WHOLE_UP_TO = 20_000;
/** Around what is shown, in widths and heights of it. */
const MARGIN = 0.5;
/** Of the margin, the fraction that must be left before more is requested. */
const LEFT = 0.3;
/** Factor in detail from which a finer part is requested. */
const FINER = 1.3;
const MOST_PIXELS = 8192;
const MOST_TRACKS = 512;

/** Pixels of what is shown in a request, which has its margins in addition. */
const detailOf = ({ pixels }: View): number => Math.min(pixels, MOST_PIXELS / (1 + 2 * MARGIN));

/** What is shown, with a margin on all sides. */
export function boundsAround(view: View, step: StepLimits): WindowBounds {
  const { fromNs, toNs, firstLane, lanes } = view;
  const side = (toNs - fromNs) * MARGIN;
  const [from, to] = [
    Math.max(step.fromNs, Math.floor(fromNs - side)),
    Math.min(step.toNs, Math.ceil(toNs + side)),
  ];
  const above = Math.ceil(lanes * MARGIN);
  const firstTrack = Math.max(0, firstLane - above);
  const width = (detailOf(view) * (to - from)) / Math.max(toNs - fromNs, 1);
  return {
    fromNs: Math.max(0, from),
    toNs: Math.max(to, from + 1),
    firstTrack,
    tracks: Math.max(
      1,
      Math.min(firstLane + lanes + above, step.lanes, firstTrack + MOST_TRACKS) - firstTrack,
    ),
    pixels: Math.min(MOST_PIXELS, Math.max(1, Math.ceil(width))),
  };
}

/** Size of the whole step. */
export interface StepLimits {
  readonly fromNs: number;
  readonly toNs: number;
  readonly lanes: number;
}

/** Whether a part has what is shown, some of the margin, and its detail. */
export function covers(bounds: WindowBounds, view: View, step: StepLimits): boolean {
  const left = (view.toNs - view.fromNs) * MARGIN * LEFT;
  const above = view.lanes * MARGIN * LEFT;
  const pixelNs = (bounds.toNs - bounds.fromNs) / bounds.pixels;
  return (
    bounds.fromNs <= Math.max(step.fromNs, view.fromNs - left) &&
    bounds.toNs >= Math.min(step.toNs, view.toNs + left) &&
    bounds.firstTrack <= Math.max(0, view.firstLane - above) &&
    bounds.firstTrack + bounds.tracks >= Math.min(step.lanes, view.firstLane + view.lanes + above) &&
    pixelNs <= ((view.toNs - view.fromNs) / detailOf(view)) * FINER
  );
}

export const boundsOf = ({ fromNs, toNs, firstTrack, tracks, pixels }: TimelineWindow): WindowBounds => ({
  fromNs,
  toNs,
  firstTrack,
  tracks,
  pixels,
});
