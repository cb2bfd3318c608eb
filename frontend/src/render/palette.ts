/** Colours that canvases need: reading them from CSS would be slow. styles/tokens.css holds the same values for the page. */
import type { ThemeName } from "./colour";

export interface Palette {
  readonly panel: string;
  readonly grid: string;
  readonly border: string;
  readonly text: string;
  readonly muted: string;
  readonly accent: string;
  readonly alarm: string;
  readonly missing: string;
}

export const PALETTES: Readonly<Record<ThemeName, Palette>> = {
  dark: {
    panel: "#151a21",
    grid: "#232a34",
    border: "#3a4452",
    text: "#e8ecf1",
    muted: "#9aa7b8",
    accent: "#6ea8fe",
    alarm: "#ff9152",
    missing: "#2d3541",
  },
  light: {
    panel: "#ffffff",
    grid: "#e8ebf0",
    border: "#c3cad4",
    text: "#171c24",
    muted: "#566274",
    accent: "#1b5fd1",
    alarm: "#c24409",
    missing: "#d7dde5",
  },
};
