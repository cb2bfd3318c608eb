/** Dark or light: what the system prefers, unless the user chose. The choice is kept in this browser. */
import { computed, ref, watchEffect } from "vue";
import type { ThemeName } from "../render/colour";
import { PALETTES } from "../render/palette";

export type ThemeChoice = "system" | ThemeName;
const KEY = "megatronapp-theme";
const CHOICES: readonly ThemeChoice[] = ["system", "dark", "light"];

const media = window.matchMedia("(prefers-color-scheme: light)");
const system = ref<ThemeName>(media.matches ? "light" : "dark");
media.addEventListener("change", (event) => (system.value = event.matches ? "light" : "dark"));

const choice = ref<ThemeChoice>(CHOICES.find((name) => name === localStorage.getItem(KEY)) ?? "system");
const theme = computed<ThemeName>(() => (choice.value === "system" ? system.value : choice.value));
const palette = computed(() => PALETTES[theme.value]);

watchEffect(() => {
  document.documentElement.dataset["theme"] = theme.value;
  localStorage.setItem(KEY, choice.value);
});

export function useTheme() {
  const next = (): void => {
    choice.value = CHOICES[(CHOICES.indexOf(choice.value) + 1) % CHOICES.length] ?? "system";
  };
  return { choice, theme, palette, next };
}
