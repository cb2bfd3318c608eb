/** Which of two compared runs the panels below a component show; absent without a comparison. */
import type { InjectionKey } from "vue";

export const SIDE: InjectionKey<string> = Symbol("side");
