/** State, cost and holder of a training that obeys orders, in words. */
import type { TrainingView } from "../../../api/types";
import { duration, integer } from "../../../store/format";

/** A pause of more GPUs than these asks before it begins. */
export const MANY_GPUS = 8;
const HOUR_S = 3600;

/** The state with a capital letter. */
export const stateText = ({ state }: TrainingView): string => state.charAt(0).toUpperCase() + state.slice(1);

const steps = (count: number): string => `${integer(count)} ${count === 1 ? "step" : "steps"}`;

/** What the ranks do now, and from which step on. */
export function detailText(training: TrainingView): string {
  const done = training.step === null ? "" : `after ${steps(training.step)}`;
  switch (training.state) {
    case "starting":
      return "the ranks do not train yet";
    case "pausing":
      return "the ranks pause after the step that runs";
    case "stepping":
      return `${steps(training.stepsLeft)} until the next pause`;
    case "stopping":
      return "a checkpoint follows the step that runs";
    case "paused":
      return done;
    case "running":
    case "ended":
      return "";
  }
}

const gpuHours = (value: number): string => `${value < 10 ? value.toFixed(2) : value.toFixed(1)} GPU-hours`;

/** Length and cost of the pause; null outside of one. `nowS`: real time in seconds. */
export function pauseText(training: TrainingView, nowS: number): string | null {
  if (training.pausedSince === null) return null;
  const lengthS = Math.max(0, nowS - Date.parse(training.pausedSince) / 1000);
  const cost =
    training.gpus > 0
      ? `: ${integer(training.gpus)} GPUs idle, ${gpuHours((training.gpus * lengthS) / HOUR_S)}`
      : "";
  return `for ${duration(lengthS)}${cost}`;
}

/** Cost of a minute of a pause. */
export const minuteText = (training: TrainingView): string =>
  `${integer(training.gpus)} GPUs stay allocated: ${gpuHours(training.gpus / 60)} per minute`;

export const captureText = ({ captureEvery }: TrainingView): string =>
  captureEvery === null ? "layers are not captured" : `layers are captured every ${steps(captureEvery)}`;

/** Why the newest order has no effect; null: it has one, or is not decided yet. */
export function refusalText({ orders }: TrainingView): string | null {
  const [newest] = orders;
  return newest?.refusal ? `The order ${newest.kind} was refused: ${newest.refusal}` : null;
}

/** What a stop does. Before the first step there is nothing to save. */
export function stopText(training: TrainingView): string {
  if (training.step === 0 && training.state === "paused")
    return "No step is done, so no checkpoint is written, and the job completes.";
  return "After the step that runs, a checkpoint is written, unless that step has one, and the job completes. A job that loads the checkpoint continues from there.";
}

/** Who controls the training, with the seconds that are left. */
export function holderText(training: TrainingView, nowS: number, mine: boolean): string {
  const { lease } = training;
  if (lease === null || lease.expiresAt <= nowS) return "no client controls this training";
  const left = `${Math.max(1, Math.ceil(lease.expiresAt - nowS))} s`;
  return mine
    ? `you control this training (${left})`
    : `controlled by ${lease.who}, ${lease.client} (${left})`;
}
