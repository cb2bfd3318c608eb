/** What verdicts mean for the page: which ranks to mark, which verdict is first, what it costs. Pure. */
import type { Verdict } from "../api/types";
import { duration, percent, rankList, ratio, seconds } from "./format";
import type { StepStore } from "./stepStore";

const ACTIVE: readonly Verdict["state"][] = ["confirmed", "suspect", "recovering"];

export const isActive = (verdict: Verdict): boolean => ACTIVE.includes(verdict.state);

/** Active verdicts, the gravest first: hangs, then confirmed before suspected, then by cost. */
export function activeVerdicts(verdicts: readonly Verdict[]): Verdict[] {
  const weight = (verdict: Verdict): number =>
    verdict.cause === "hang" ? -1 : ACTIVE.indexOf(verdict.state);
  return verdicts
    .filter(isActive)
    .sort(
      (left, right) =>
        weight(left) - weight(right) || right.effect.secondsPerStep - left.effect.secondsPerStep,
    );
}

/** The state in words. */
export const stateName = (verdict: Verdict): string =>
  verdict.stale ? `unknown while its detector starts again, before that ${verdict.state}` : verdict.state;

/** Why the page cannot show a step as `verdict` found it: another attempt has it, too. Undefined where it can. */
export function hiddenReason(store: StepStore, { since }: Verdict, step: number): string | undefined {
  const held = store.attemptOf(step);
  return held === undefined || held === since.attempt
    ? undefined
    : `The finding is of attempt ${since.attempt}; step ${step} is shown of attempt ${held}`;
}

/** Ranks that a present verdict names, not the whole job. */
export function suspectRanks(verdicts: readonly Verdict[]): ReadonlySet<number> {
  const named = verdicts.filter(
    (verdict) => isActive(verdict) && !verdict.stale && verdict.subject.type !== "job",
  );
  return new Set(named.flatMap((verdict) => verdict.subject.ranks));
}

/** The subject in two words. */
export function subjectName({ subject }: Verdict): string {
  const [source, destination] = subject.ranks;
  switch (subject.type) {
    case "link":
      return `Link ${source} → ${destination}`;
    case "replica":
      return `Replica of ${rankList(subject.ranks)}`;
    case "group":
      return `Links of ${rankList(subject.ranks)}`;
    case "worker":
      return `Worker ${subject.worker ?? "?"}`;
    case "node":
      return `Node ${subject.node ?? "?"}`;
    case "stage":
      return `Stage of ${rankList(subject.ranks)}`;
    case "job":
      return "All ranks";
    default:
      return `Rank ${source ?? "?"}`;
  }
}

const CAUSES: Readonly<Record<Verdict["cause"], string>> = {
  compute: "slow compute",
  memory: "busy memory",
  host: "host stalls",
  link: "slow link",
  "nvlink-pcie": "slow NVLink or PCIe",
  data: "slow data loading",
  "data-imbalance": "more tokens than others",
  regression: "slower than before",
  hang: "hung",
  undetermined: "cause undetermined",
};

/** The cause, and its reason where it is known. */
export const causeName = ({ cause, reason }: Verdict): string =>
  CAUSES[cause] + (reason ? ` (${reason.replace("-", " ").replace("cpu", "CPU")})` : "");

export interface Cost {
  readonly perStepS: number;
  /** Share by which each step became longer; undefined where the step time is unknown. */
  readonly longer: number | undefined;
  readonly stepsSoFar: number;
  /** Seconds lost in the steps in which it was active. */
  readonly totalS: number;
}

/** Cost of `verdict` up to `newestStep`, where a step now takes `stepS` seconds. */
export function costOf(verdict: Verdict, newestStep: number, stepS: number | undefined): Cost {
  const perStepS = verdict.effect.secondsPerStep;
  const last = verdict.until?.step ?? newestStep;
  const stepsSoFar = Math.max(0, last - verdict.since.step + 1);
  const healthyS = stepS === undefined ? 0 : stepS - perStepS;
  return {
    perStepS,
    longer: healthyS > 0 ? perStepS / healthyS : undefined,
    stepsSoFar,
    totalS: verdict.effect.secondsLost ?? 0,
  };
}

/** One large number and what it means. */
export interface Figure {
  readonly value: string;
  readonly name: string;
}

/** The numbers to show large next to a verdict; what is unknown or zero is left out. */
export function costFigures(verdict: Verdict, cost: Cost): Figure[] {
  const { slowdown } = verdict.effect;
  const { perStepS, longer, totalS, stepsSoFar } = cost;
  if (verdict.cause === "hang") return [{ value: duration(perStepS), name: "without progress" }];
  const figures: Figure[] = [];
  if (typeof slowdown === "number" && slowdown > 1)
    figures.push({ value: ratio(slowdown), name: "as long as expected" });
  if (perStepS <= 0) return figures;
  const share = longer === undefined ? "" : ` (+${percent(longer)})`;
  figures.push({ value: `+${seconds(perStepS)}`, name: `on every step${share}` });
  const steps = `${stepsSoFar} ${stepsSoFar === 1 ? "step" : "steps"}`;
  return [...figures, { value: totalS < 100 ? seconds(totalS) : duration(totalS), name: `lost in ${steps}` }];
}
