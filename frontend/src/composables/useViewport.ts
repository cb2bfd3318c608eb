/** Pan and zoom of one axis by mouse, wheel and keyboard; shared by curves, heat map and timeline. */
import { computed, ref, type ComputedRef } from "vue";
import {
  clamp,
  length,
  linear,
  pan,
  reveal,
  zoom,
  type Limits,
  type Scale,
  type Span,
} from "../render/viewport";

const KEY_PAN = 0.2;
const KEY_ZOOM = 1.5;
const WHEEL_ZOOM = 0.002; // per pixel of the wheel: one notch (100) is a fifth
const DRAG_THRESHOLD_PX = 4;

/** Pixels of the canvas between which the axis runs. */
export interface Frame {
  readonly left: number;
  readonly right: number;
}

export interface ViewportApi {
  readonly view: ComputedRef<Span>;
  /** Whether the whole range is shown (and keeps being shown as it grows). */
  readonly whole: ComputedRef<boolean>;
  readonly fit: () => void;
  readonly set: (span: Span) => void;
  /** Move, if needed, so that `at` .. `at + width` is visible. */
  readonly show: (at: number, width: number) => void;
  readonly scale: (frame: Frame) => Scale;
  readonly zoomBy: (factor: number, anchor?: number) => void;
  /** Move by a share of the visible window. */
  readonly panBy: (share: number) => void;
  readonly limits: () => Limits;
}

/** `limits` is the whole range of the axis; it may grow while training runs. */
export function useViewport(limits: () => Limits): ViewportApi {
  const chosen = ref<Span | null>(null);
  const view = computed(() => clamp(chosen.value ?? limits(), limits()));
  const set = (span: Span): void => {
    const clamped = clamp(span, limits());
    chosen.value = length(clamped) >= length(limits()) ? null : clamped;
  };
  return {
    view,
    set,
    limits,
    whole: computed(() => chosen.value === null),
    fit: () => {
      chosen.value = null;
    },
    show: (at, width) => {
      const shown = reveal(view.value, at, width, limits());
      if (shown !== view.value) set(shown);
    },
    scale: (frame) => linear(view.value, frame.left, frame.right),
    zoomBy: (factor, anchor = (view.value.from + view.value.to) / 2) =>
      set(zoom(view.value, factor, anchor, limits())),
    panBy: (share) => set(pan(view.value, share, limits())),
  };
}

/**
 * Ctrl zooms, and so does the wheel alone once the canvas has focus, but where `scrolls`; shift or a sideways wheel pans;
 * else the page scrolls, or what is around the canvas.
 */
export function onWheel(viewport: ViewportApi, event: WheelEvent, frame: Frame, scrolls = false): void {
  const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
  const upright = event.shiftKey ? 0 : event.deltaY;
  const zooms =
    event.ctrlKey || event.metaKey || (!scrolls && document.activeElement === event.currentTarget);
  if (Math.abs(sideways) > Math.abs(upright)) viewport.panBy(sideways / (frame.right - frame.left));
  else if (zooms)
    viewport.zoomBy(Math.exp(upright * WHEEL_ZOOM), viewport.scale(frame).toValue(event.offsetX));
  else return;
  event.preventDefault();
}

type Action = (viewport: ViewportApi, anchor: number | undefined) => void;

const closer: Action = (viewport, anchor) => viewport.zoomBy(1 / KEY_ZOOM, anchor);
const farther: Action = (viewport, anchor) => viewport.zoomBy(KEY_ZOOM, anchor);
const ACTIONS: Readonly<Record<string, Action>> = {
  "+": closer,
  "=": closer,
  w: closer,
  "-": farther,
  s: farther,
  a: (viewport) => viewport.panBy(-KEY_PAN),
  d: (viewport) => viewport.panBy(KEY_PAN),
  "0": (viewport) => viewport.fit(),
};

/** Acts on the keys of pan and zoom; `anchor` (what is selected) keeps its place. */
export function onKey(viewport: ViewportApi, event: KeyboardEvent, anchor?: number): void {
  const action = event.ctrlKey || event.metaKey || event.altKey ? undefined : ACTIONS[event.key];
  if (!action) return;
  event.preventDefault();
  action(viewport, anchor);
}

/** Follows the pointer until it is released; a press without a move is a click. */
export function startDrag(
  viewport: ViewportApi,
  event: PointerEvent,
  frame: Frame,
  onClick: (event: PointerEvent) => void,
): void {
  if (event.button !== 0) return;
  const target = event.currentTarget as HTMLElement;
  const [startX, start] = [event.clientX, viewport.view.value];
  let moved = false;
  const move = (step: PointerEvent): void => {
    const by = startX - step.clientX;
    moved ||= Math.abs(by) > DRAG_THRESHOLD_PX;
    if (moved) viewport.set(pan(start, by / (frame.right - frame.left), viewport.limits()));
  };
  const end = (last: PointerEvent): void => {
    target.removeEventListener("pointermove", move);
    target.removeEventListener("pointerup", end);
    target.removeEventListener("pointercancel", end);
    if (!moved && last.type === "pointerup") onClick(last);
  };
  target.setPointerCapture(event.pointerId);
  target.addEventListener("pointermove", move);
  target.addEventListener("pointerup", end);
  target.addEventListener("pointercancel", end);
}
