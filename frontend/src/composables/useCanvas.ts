/** A canvas that is redrawn once per frame when something it shows has changed, at the device's resolution. */
import { onBeforeUnmount, onMounted, ref, watch, type Ref } from "vue";
import { Surface } from "../render/surface";

export interface CanvasHandle {
  /** Width of the canvas in CSS pixels. */
  readonly width: Ref<number>;
}

/**
 * `draw` is called in an animation frame whenever `sources` or the size changes.
 * `height` is in CSS pixels; the width follows the element.
 * The attribute `data-drawn` of the canvas is `content`, what was drawn; it is absent while a frame is waited for.
 */
export function useCanvas(
  canvas: Readonly<Ref<HTMLCanvasElement | null>>,
  height: () => number,
  sources: () => unknown,
  draw: (surface: Surface) => void,
  content: () => string,
): CanvasHandle {
  const width = ref(0);
  let surface: Surface | undefined;
  let frame = 0;

  const paint = (): void => {
    frame = 0;
    const element = canvas.value;
    if (!element || width.value < 1) return;
    if (surface?.canvas !== element) surface = new Surface(element);
    surface.begin(width.value, height(), window.devicePixelRatio || 1);
    draw(surface);
    element.dataset["drawn"] = content();
  };
  const redraw = (): void => {
    delete canvas.value?.dataset["drawn"];
    frame ||= requestAnimationFrame(paint);
  };
  const observer = new ResizeObserver(([entry]) => {
    width.value = Math.floor(entry?.contentRect.width ?? 0);
    redraw();
  });

  onMounted(() => {
    watch(
      canvas,
      (element, before) => {
        if (before) observer.unobserve(before);
        if (element) observer.observe(element);
      },
      { immediate: true },
    );
    watch([sources, height, content], redraw);
    document.fonts.ready.then(redraw, redraw);
  });
  onBeforeUnmount(() => {
    observer.disconnect();
    cancelAnimationFrame(frame);
  });
  return { width };
}
