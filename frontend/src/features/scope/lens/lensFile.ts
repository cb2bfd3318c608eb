/** Files of the logit lens, as the page shows it. */
import type { Format, Lens } from "../../../scope/client";
import { csvText, npyBytes } from "../../../scope/files/npy";
import { lensTexts, lensValue, type LensView } from "./lensViews";

/** CSV: a line for each layer and position with the likeliest token; NPY: the numbers that are shown, [layers, positions]. */
export function lensFile(lens: Lens, view: LensView, format: Format): Blob {
  const texts = lensTexts(lens);
  const places = lens.layers.flatMap((layer, row) =>
    lens.positions.map((position, column) => ({ layer, position, row, column })),
  );
  if (format !== "csv") {
    const values = places.map(({ row, column }) => lensValue(lens, view, row, column) ?? Number.NaN);
    return new Blob([npyBytes(Float32Array.from(values), [lens.layers.length, lens.positions.length])]);
  }
  const head = ["layer", "position", "id", "text", "probability", "entropy", "rank of the next token"];
  const lines = places.map(({ layer, position, row, column }) => {
    const id = lens.ids[row]?.[column]?.[0] ?? Number.NaN;
    const numbers = (["top", "entropy", "rank"] as const).map(
      (name) => lensValue(lens, name, row, column) ?? "",
    );
    return [layer, position, id, texts.get(id) ?? "", ...numbers];
  });
  return new Blob([csvText([head, ...lines])], { type: "text/csv" });
}
