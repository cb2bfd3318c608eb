/** Whether this browser has used MegaScope before. */
const KEY = "megatronapp-scope-visited";

/** A browser that stores nothing counts as a first visit each time. */
export function isFirstVisit(): boolean {
  try {
    return localStorage.getItem(KEY) === null;
  } catch {
    return true;
  }
}

export function markVisited(): void {
  try {
    localStorage.setItem(KEY, "yes");
  } catch {
    // Storage may be full or forbidden; then the caption appears again.
  }
}
