/** Reduces columns and rows of a matrix to at most one per pixel by their maximum, so that a single slow step stays visible. */

/**
 * `values` is [rows][columns]; the answer is [rows][target]. NaN counts as missing and yields to any number.
 */
export function maxPool(values: Float32Array, columns: number, rows: number, target: number): Float32Array {
  if (target >= columns) return values;
  const out = new Float32Array(rows * target).fill(Number.NaN);
  for (let row = 0; row < rows; row += 1) {
    for (let column = 0; column < columns; column += 1) {
      const value = values[row * columns + column] ?? Number.NaN;
      const at = row * target + Math.floor((column * target) / columns);
      const before = out[at] ?? Number.NaN;
      if (Number.isNaN(before) || value > before) out[at] = value;
    }
  }
  return out;
}

/** `values` is [rows][columns]; the answer is [target][columns]: the maximum of neighbouring rows. */
export function maxPoolRows(
  values: Float32Array,
  columns: number,
  rows: number,
  target: number,
): Float32Array {
  if (target >= rows) return values;
  const out = new Float32Array(target * columns).fill(Number.NaN);
  for (let row = 0; row < rows; row += 1) {
    const to = Math.floor((row * target) / rows) * columns;
    for (let column = 0; column < columns; column += 1) {
      const value = values[row * columns + column] ?? Number.NaN;
      const before = out[to + column] ?? Number.NaN;
      if (Number.isNaN(before) || value > before) out[to + column] = value;
    }
  }
  return out;
}
