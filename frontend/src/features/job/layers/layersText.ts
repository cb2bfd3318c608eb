/** Captured statistics of layers in words, and as a file. */
import type { Captures, Quantity, SiteStatistics } from "../../../api/types";
import { csvText } from "../../../scope/files/npy";
import { ABSENT, integer } from "../../../store/format";

export const QUANTITIES: readonly { readonly value: Quantity; readonly label: string }[] = [
  { value: "rms", label: "rms" },
  { value: "mean", label: "mean" },
  { value: "largest", label: "largest magnitude" },
  { value: "ratio", label: "rms over that of the weights" },
  { value: "zeros", label: "share of zeros" },
  { value: "notFinite", label: "share of NaN and Inf" },
];

const SITES: Readonly<Record<string, string>> = {
  embedding: "embedding",
  attention_output: "attention output",
  mlp1: "MLP, first layer",
  mlp2: "MLP, second layer",
  residual: "residual",
  final_norm: "final norm",
  gradient: "gradients",
  weight: "weights",
  update: "updates of weights",
};

export const siteText = (site: string): string => SITES[site] ?? site;

/** A row: its layer, or what has none. */
export function layerText(site: string, layer: number): string {
  if (layer >= 0) return `layer ${layer}`;
  return ["gradient", "weight", "update"].includes(site) ? "other" : "model";
}

/** Three significant digits, as 3.1e-5 where they are far from one. */
export function numberText(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return ABSENT;
  const size = Math.abs(value);
  return size !== 0 && (size >= 1e5 || size < 1e-3) ? value.toExponential(2) : value.toPrecision(3);
}

/** A cell: layer, step, value, and how many NaN and Inf there are. */
export function cellText(captures: Captures, row: number, column: number): string {
  const layer = layerText(captures.site, captures.layers[row] ?? -1);
  const step = captures.steps[column];
  const bad = captures.notFinite[row]?.[column] ?? 0;
  const value = numberText(captures.values[row]?.[column]);
  const broken = bad > 0 ? `, ${integer(bad)} NaN or Inf` : "";
  const perturbed = step?.perturbation ? `, perturbed by ${step.perturbation}` : "";
  return `${layer}, step ${integer(step?.step)}: ${value}${broken}${perturbed}`;
}

/** What of the steps needs attention: the first NaN or Inf, and ranks that sent nothing. */
export function warnings(captures: Captures): string[] {
  const found: string[] = [];
  const broken = captures.steps.find((step) => step.firstNotFinite);
  if (broken?.firstNotFinite) {
    const { site, layer } = broken.firstNotFinite;
    found.push(
      `NaN or Inf since step ${integer(broken.step)}, first in ${siteText(site)}, ${layerText(site, layer)}.`,
    );
  }
  const perturbed = captures.steps.filter((step) => step.perturbation);
  const last = perturbed.at(-1);
  if (last)
    found.push(
      `${perturbed.length} of ${captures.steps.length} steps were perturbed, the newest is step ${integer(last.step)} (${last.perturbation}).`,
    );
  const partial = captures.steps.filter((step) => step.missing.length > 0);
  const newest = partial.at(-1);
  if (newest)
    found.push(
      `${partial.length} of ${captures.steps.length} steps are incomplete; in step ${integer(newest.step)} ranks ${newest.missing.join(", ")} are missing.`,
    );
  return found;
}

export function csvOf(captures: Captures): Blob {
  const head = ["site", "layer", "step", captures.quantity, "NaN and Inf", "perturbation"];
  const lines = captures.layers.flatMap((layer, row) =>
    captures.steps.map(({ step, perturbation }, column) => [
      captures.site,
      layer,
      step,
      captures.values[row]?.[column] ?? "",
      captures.notFinite[row]?.[column] ?? 0,
      perturbation ?? "",
    ]),
  );
  return new Blob([csvText([head, ...lines])], { type: "text/csv" });
}

/** Bins of a histogram from the first to the last that has values, with the magnitudes that they begin at. */
export function filledBins(
  statistics: SiteStatistics,
  firstExponent: number,
): readonly { readonly exponent: number; readonly count: number }[] {
  const bins = statistics.histogram.map((count, at) => ({ exponent: firstExponent + at, count }));
  const first = bins.findIndex(({ count }) => count > 0);
  const last = bins.findLastIndex(({ count }) => count > 0);
  return first < 0 ? [] : bins.slice(first, last + 1);
}
