/** Lists of steps in ascending order, as the stores keep them. */

/** Index of the first element not below `value` in an ascending list. */
export function position(sorted: readonly number[], value: number): number {
  let [low, high] = [0, sorted.length];
  if (high === 0 || (sorted[high - 1] ?? 0) < value) return high;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((sorted[middle] ?? 0) < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/**
 * Indices of the oldest steps beyond `capacity`, where `attempts` are those of ascending steps. An attempt that resumes
 * from a checkpoint has lower step numbers than the one before, so older attempts go first.
 */
export function oldest(attempts: readonly number[], capacity: number): ReadonlySet<number> {
  const excess = attempts.length - capacity;
  if (excess <= 0) return new Set();
  const byAge = [...attempts.keys()].sort((left, right) => (attempts[left] ?? 0) - (attempts[right] ?? 0));
  return new Set(byAge.slice(0, excess));
}
