/** Settings of a run, in words. */
import {
  DEFAULT_CAPTURE,
  STATES,
  type Capture,
  type RunHeader,
  type Sampling,
} from "../../../scope/protocol";
import { visibleText } from "../../../scope/views/tokenText";
import { STATE_NAMES } from "../texts";

const listed = (parts: readonly (string | false | undefined)[]): string => parts.filter(Boolean).join(", ");

const drawn = ({ temperature = 1, topK = 0, topP = 1 }: Partial<Sampling>): string =>
  temperature > 0
    ? listed([`temperature ${temperature}`, topP < 1 && `top-p ${topP}`, topK > 0 && `top-k ${topK}`])
    : "greedy (temperature 0)";

/** Sampling of a run: with its prompts enough to repeat it. Empty until the run has reported it. */
export function samplingText({ sampling, tokens }: Pick<RunHeader, "sampling" | "tokens">): string {
  if (!sampling) return "";
  const { seed = null, stop = [] } = sampling;
  return listed([
    drawn(sampling),
    seed !== null && `seed ${seed}`,
    tokens !== undefined && `at most ${tokens} new tokens`,
    stop.length > 0 && `stops at ${stop.map((word) => `“${visibleText(word)}”`).join(" ")}`,
  ]);
}

/** What was captured of a run, where it differs from the default. */
export function captureText(capture: Partial<Capture> | null | undefined): string {
  if (!capture) return "";
  const { preset, states, pixels, expression, rotary, pinned } = { ...DEFAULT_CAPTURE, ...capture };
  const usual = DEFAULT_CAPTURE;
  const off = STATES.filter((name) => !states[name]).map((name) => STATE_NAMES[name]);
  return listed([
    preset !== usual.preset && `capture ${preset}`,
    off.length > 0 && `without ${off.join(", ")}`,
    rotary !== usual.rotary && "Q and K before rotation",
    ...(["qkv", "mlp"] as const).flatMap((name) => [
      pixels[name] !== usual.pixels[name] &&
        `${pixels[name]} pixels of ${name === "mlp" ? "the MLP" : "Q, K, V"}`,
      expression[name] !== usual.expression[name] &&
        `a pixel of ${name === "mlp" ? "the MLP" : "Q, K, V"} is ${expression[name]}`,
    ]),
    pinned.length > 0 && `pinned ${pinned.map((one) => `${one.layer}.${one.head}`).join(" ")}`,
  ]);
}
