/** Names of the heat map's metrics. */
import type { Metric } from "../api/types";

export const METRIC_LABELS: Readonly<Record<Metric, string>> = {
  slowdown: "Slowdown against peers",
  compute: "Compute time",
  wait: "Time waiting for peers",
  step: "Step time",
};

export const METRIC_OPTIONS: readonly {
  readonly value: Metric;
  readonly label: string;
  readonly title: string;
}[] = [
  {
    value: "slowdown",
    label: "Slowdown",
    title:
      "Compute time against the median of the peers (the faster of two: its own last steps); 1× is healthy",
  },
  { value: "compute", label: "Compute", title: "Seconds of forward and backward per step" },
  { value: "wait", label: "Wait", title: "Seconds per step spent waiting for other ranks" },
  { value: "step", label: "Step", title: "Seconds per step" },
];
