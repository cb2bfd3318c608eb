/** What the picture of all heads can show. */
export const HEAD_VIEWS = [
  {
    value: "head.entropy",
    label: "Entropy",
    note: "how evenly each head looks",
    unit: "entropy over log of the keys",
  },
  {
    value: "head.sink",
    label: "Sink",
    note: "how much each head looks at the first token",
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
    note: "each head over the prompt, 8 by 8, largest values",
    unit: "probability",
  },
] as const;

export type HeadView = (typeof HEAD_VIEWS)[number]["value"];
