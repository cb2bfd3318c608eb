/** Header of a frame of steps for tests. */
import type { StepsHeader } from "./stepStore";

export const header = (change: Partial<StepsHeader> = {}): StepsHeader => ({
  attempt: 0,
  steps: [6],
  startsNs: [0],
  durationsNs: [2.5e8],
  ranks: [0, 1],
  metrics: ["compute", "wait"],
  ...change,
});
