/** A panel that may fill the window: how high its picture is then. */
import { computed, onBeforeUnmount, onMounted, ref, type ComputedRef, type Ref } from "vue";

export interface LargePanel {
  readonly large: Ref<boolean>;
  /** In CSS pixels. */
  readonly height: ComputedRef<number>;
}

/** `normal` is the usual height of the picture; `around` what the rest of the panel needs when it fills the window. */
export function useLargePanel(normal: number, around: number): LargePanel {
  const large = ref(false);
  const windowHeight = ref(window.innerHeight);
  const measure = (): void => {
    windowHeight.value = window.innerHeight;
  };
  onMounted(() => window.addEventListener("resize", measure));
  onBeforeUnmount(() => window.removeEventListener("resize", measure));
  const height = computed(() => (large.value ? Math.max(normal, windowHeight.value - around) : normal));
  return { large, height };
}
