/** Keys of the scope screen, for the list behind `?`. */
import type { KeyMeaning } from "../../composables/useKeyList";

export const KEYS: readonly KeyMeaning[] = [
  ["[  ]", "previous, next token"],
  ["n", "newest token, and follow it"],
  ["1 .. 6", "layers, attention, probabilities, PCA, lens, perturbation"],
  ["c", "show or hide the controls"],
  ["g", "go to the first prompt"],
  ["Ctrl Enter", "in a prompt: generate"],
  ["← → ↑ ↓", "in a picture: move; with Shift by eight"],
  ["Home  End", "first, last column"],
  ["Enter", "among the heads: lock the one that is previewed"],
  ["p", "in attention: pin or unpin the head"],
  ["m", "the panel in focus, or the first: fill the window; Escape: back"],
  ["t  l", "in a panel: table, hold the colour scale"],
  ["s", "of two compared runs: B − A, A, B, both"],
  ["r", "next rank, then all ranks"],
  ["+  −  0", "in a picture: zoom, fit everything"],
  ["a  d", "pan"],
  ["?", "this list"],
];
