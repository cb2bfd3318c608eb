import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { ref } from "vue";
import { onKey, onWheel, startDrag, useViewport, type ViewportApi } from "./useViewport";

const FRAME = { left: 100, right: 1100 };
const limits = ref({ from: 0, to: 100, minimum: 10 });
let viewport: ViewportApi;
let canvas: HTMLElement;

beforeEach(() => {
  limits.value = { from: 0, to: 100, minimum: 10 };
  viewport = useViewport(() => limits.value);
  canvas = document.createElement("div");
  canvas.tabIndex = 0;
  canvas.setPointerCapture = vi.fn();
  document.body.append(canvas);
});
afterEach(() => canvas.remove());

/** Send an event to the canvas through `handle`; returns whether the page's own answer to it was prevented. */
function sent<Sent extends Event>(event: Sent, handle: (event: Sent) => void): boolean {
  canvas.addEventListener(event.type, (received) => handle(received as Sent), { once: true });
  return !canvas.dispatchEvent(event);
}
function wheel(
  options: WheelEventInit & { offsetX?: number; ctrlKey?: boolean; shiftKey?: boolean },
): boolean {
  const event = new WheelEvent("wheel", { cancelable: true, ...options });
  Object.defineProperties(event, {
    offsetX: { value: options.offsetX ?? 600 },
    ctrlKey: { value: options.ctrlKey ?? false },
    shiftKey: { value: options.shiftKey ?? false },
  });
  return sent(event, (received) => onWheel(viewport, received, FRAME));
}
const key = (name: string, options: KeyboardEventInit = {}, anchor?: number): boolean =>
  sent(new KeyboardEvent("keydown", { key: name, cancelable: true, ...options }), (event) =>
    onKey(viewport, event, anchor),
  );

describe("useViewport", () => {
  it("shows everything as it grows until a window is chosen, and again after fit", () => {
    limits.value = { from: 0, to: 150, minimum: 10 };
    expect([viewport.view.value, viewport.whole.value]).toEqual([{ from: 0, to: 150 }, true]);
    viewport.set({ from: 20, to: 40 });
    limits.value = { from: 0, to: 200, minimum: 10 };
    expect([viewport.view.value, viewport.whole.value]).toEqual([{ from: 20, to: 40 }, false]);
    viewport.fit();
    expect([viewport.view.value, viewport.whole.value]).toEqual([{ from: 0, to: 200 }, true]);
  });

  it("follows the growth again once zooming out has reached everything", () => {
    viewport.set({ from: 20, to: 60 });
    viewport.zoomBy(5);
    expect(viewport.whole.value).toBe(true);
  });

  it("moves only for what is outside, and leaves a whole view whole", () => {
    viewport.show(50, 1);
    expect(viewport.whole.value).toBe(true);
    viewport.set({ from: 20, to: 40 });
    viewport.show(30, 1);
    expect(viewport.view.value).toEqual({ from: 20, to: 40 });
    viewport.show(70, 1);
    expect(viewport.view.value.from).toBeLessThanOrEqual(70);
    expect(viewport.view.value.to).toBeGreaterThanOrEqual(71);
    expect(viewport.view.value.to - viewport.view.value.from).toBeCloseTo(20);
  });
});

describe("onWheel", () => {
  it("leaves the page to scroll without Ctrl and without focus", () => {
    expect(wheel({ deltaY: -100 })).toBe(false);
    expect(viewport.whole.value).toBe(true);
  });

  it("zooms with Ctrl, or with focus, around the value under the pointer", () => {
    expect(wheel({ deltaY: -100, ctrlKey: true, offsetX: 350 })).toBe(true);
    const { from, to } = viewport.view.value;
    expect(to - from).toBeCloseTo(100 * Math.exp(-0.2));
    expect(viewport.scale(FRAME).toValue(350)).toBeCloseTo(25);
    canvas.focus();
    expect(wheel({ deltaY: -100 })).toBe(true);
    expect(viewport.view.value.to - viewport.view.value.from).toBeLessThan(to - from);
  });

  it.each([
    ["sideways", { deltaX: 100 }],
    ["with Shift", { deltaY: 100, shiftKey: true }],
  ])("pans by as many pixels %s", (_, options) => {
    viewport.set({ from: 20, to: 40 });
    expect(wheel(options)).toBe(true);
    expect(viewport.view.value).toEqual({ from: 22, to: 42 });
  });
});

describe("onKey", () => {
  it("zooms around the anchor, pans, fits, and takes no other key", () => {
    viewport.set({ from: 20, to: 50 });
    expect(key("+", {}, 20)).toBe(true);
    expect(viewport.view.value).toEqual({ from: 20, to: 40 });
    expect(key("d")).toBe(true);
    expect(viewport.view.value).toEqual({ from: 24, to: 44 });
    expect(key("0")).toBe(true);
    expect(viewport.whole.value).toBe(true);
    expect([key("x"), key("+", { ctrlKey: true })]).toEqual([false, false]);
    expect(viewport.whole.value).toBe(true);
  });
});

describe("startDrag", () => {
  const pointer = (type: string, clientX: number, button = 0): PointerEvent =>
    new PointerEvent(type, { clientX, button, pointerId: 1 });
  function press(button = 0): ReturnType<typeof vi.fn> {
    const clicked = vi.fn();
    sent(pointer("pointerdown", 500, button), (event) => startDrag(viewport, event, FRAME, clicked));
    return clicked;
  }

  it("pans with the pointer and is no click", () => {
    viewport.set({ from: 20, to: 40 });
    const clicked = press();
    canvas.dispatchEvent(pointer("pointermove", 400));
    canvas.dispatchEvent(pointer("pointermove", 450));
    expect(viewport.view.value).toEqual({ from: 21, to: 41 });
    canvas.dispatchEvent(pointer("pointerup", 450));
    canvas.dispatchEvent(pointer("pointermove", 100));
    expect(viewport.view.value).toEqual({ from: 21, to: 41 });
    expect(clicked).not.toHaveBeenCalled();
  });

  it("is a click within four pixels, with the first button, and unless it is cancelled", () => {
    viewport.set({ from: 20, to: 40 });
    const clicked = press();
    canvas.dispatchEvent(pointer("pointermove", 503));
    canvas.dispatchEvent(pointer("pointerup", 503));
    expect(clicked).toHaveBeenCalledOnce();
    expect(viewport.view.value).toEqual({ from: 20, to: 40 });
    const cancelled = press();
    canvas.dispatchEvent(pointer("pointercancel", 500));
    const second = press(2);
    canvas.dispatchEvent(pointer("pointerup", 500));
    expect([cancelled, second].flatMap(({ mock }) => mock.calls)).toEqual([]);
  });
});
