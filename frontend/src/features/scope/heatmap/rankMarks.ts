/** Marks of what a rank holds. */
import type { Range } from "../../../scope/layout";
import type { Mark } from "./heatPicture";

/** Rows of a rank over `columns` columns, or over its own. */
export function areaOf([first, end]: Range, columns: number | Range): Mark {
  const [left, right] = typeof columns === "number" ? [0, columns] : columns;
  return { row: first, column: left, rows: end - first, columns: right - left, kind: "area" };
}
