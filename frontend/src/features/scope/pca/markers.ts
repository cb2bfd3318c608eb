/** Shapes of markers around (0, 0), about ten pixels wide: prompts never differ by colour alone. */
export const SHAPES: readonly string[] = [
  "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0Z",
  "M-4-4h8v8h-8Z",
  "M0-5 5 4H-5Z",
  "M0-5.5 5.5 0 0 5.5-5.5 0Z",
  "M0 5-5-4H5Z",
  "M-1.7-5h3.4v3.3H5v3.4H1.7V5h-3.4V1.7H-5v-3.4h3.3Z",
  "M-4-5 0-1.6 4-5 5-4 1.6 0 5 4 4 5 0 1.6-4 5-5 4-1.6 0-5-4Z",
  "M-5-2.4h10v4.8H-5Z",
];
