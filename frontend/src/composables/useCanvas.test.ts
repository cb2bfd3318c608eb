import { mount } from "@vue/test-utils";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { nextTick } from "vue";
import PictureCanvas from "../ui/PictureCanvas.vue";

const frames: (() => void)[] = [];
const resized: ((entries: readonly { contentRect: { width: number } }[]) => void)[] = [];
const paint = (): void => {
  for (const frame of frames.splice(0)) frame();
};

beforeEach(() => {
  Object.defineProperty(document, "fonts", { value: { ready: Promise.resolve() }, configurable: true });
  vi.stubGlobal("requestAnimationFrame", (frame: () => void) => frames.push(frame));
  vi.stubGlobal("cancelAnimationFrame", () => frames.splice(0));
  vi.stubGlobal(
    "ResizeObserver",
    class {
      constructor(told: (entries: readonly { contentRect: { width: number } }[]) => void) {
        resized.push(told);
      }
      observe(): void {}
      unobserve(): void {}
      disconnect(): void {}
    },
  );
  const context = { setTransform: vi.fn(), clearRect: vi.fn() };
  vi.spyOn(HTMLCanvasElement.prototype, "getContext").mockReturnValue(context as never);
});
afterEach(() => vi.unstubAllGlobals());

it("names what is drawn, and nothing while a frame is waited for", async () => {
  const draw = vi.fn();
  const picture = mount(PictureCanvas, {
    props: { label: "heads", height: 20, sources: () => 0, draw, content: "head 0" },
  });
  const drawn = (): string | undefined => picture.attributes("data-drawn");
  await nextTick();
  paint();
  expect([drawn(), draw.mock.calls.length]).toEqual([undefined, 0]);
  const [resize] = resized.splice(0);
  resize?.([{ contentRect: { width: 30 } }]);
  expect(drawn()).toBeUndefined();
  paint();
  expect([drawn(), draw.mock.calls.length]).toEqual(["head 0", 1]);
  await picture.setProps({ content: "head 1" });
  expect(drawn()).toBeUndefined();
  paint();
  expect(drawn()).toBe("head 1");
  resize?.([{ contentRect: { width: 40 } }]);
  expect(drawn()).toBeUndefined();
  paint();
  expect([drawn(), draw.mock.calls.length]).toEqual(["head 1", 3]);
  picture.unmount();
});
