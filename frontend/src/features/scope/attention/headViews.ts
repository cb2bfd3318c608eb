import { atlasEdge } from "../../../scope/views/matrices";
import type { SampleStore } from "../../../scope/store/sampleStore";

/** What the picture of all heads can show. */
export const HEAD_VIEWS = [
  {
    value: "head.entropy",
    label: "Entropy",
    note: "how evenly each head spreads its attention",
    unit: "entropy over log of the keys",
  },
  {
    value: "head.sink",
    label: "Sink",
    note: "how much each head attends to the first token",
    unit: "probability of key 0",
  },
  {
    value: "head.max",
    label: "Max",
    note: "the largest share that one key gets",
    unit: "largest probability",
  },
  {
    value: "atlas",
    label: "Patterns",
    note: "each head over the prompt",
    unit: "probability",
  },
] as const;

export type HeadView = (typeof HEAD_VIEWS)[number]["value"];

/** What a head's picture is of. */
export function patternNote(sample: SampleStore | null): string {
  if (!sample?.atlas) return "each head over the prompt";
  const { promptLength } = sample;
  const edge = atlasEdge(sample);
  const cells = promptLength > edge ? `, ${edge} by ${edge}, largest value of each cell` : "";
  return `each head over the ${promptLength} token${promptLength === 1 ? "" : "s"} of the prompt${cells}`;
}
