/** Why a panel has nothing to show, in plain words. */
import type { ApiError } from "../../api/client";
import type { Capture, Readiness, RunHeader, StateName } from "../../scope/protocol";
import { STATE_NAMES } from "./texts";

export interface PanelMessage {
  readonly kind: "loading" | "empty" | "error";
  readonly title: string;
  readonly hint: string;
}

/** State of the screen that a panel's message depends on. */
export interface Surroundings {
  readonly header: Pick<RunHeader, "state" | "capture" | "error"> | null;
  /** Whether the hub is connected. */
  readonly connected: boolean;
  readonly readiness: Readiness;
}

/** Whether a run captures a state; a state that it does not name is captured. */
export function isCaptured(capture: Partial<Capture> | undefined, name: StateName): boolean {
  if (capture?.preset === "off") return name === "probabilities";
  if (capture?.preset === "lite" && name === "mlp1") return false;
  return capture?.states?.[name] !== false;
}

/** Why values that are missing cannot arrive; null: they still can. */
function obstacle({ header, connected, readiness }: Surroundings): PanelMessage | null {
  const state = header?.state;
  if (state === "failed") {
    const { message = "The hub does not know why.", hint = "" } = header?.error ?? {};
    return {
      kind: "error",
      title: "The run failed before these values arrived",
      hint: `${message} ${hint}`.trim(),
    };
  }
  if (!connected)
    return {
      kind: "empty",
      title: "Unknown: the connection to the hub is lost",
      hint: "The page reconnects by itself and fetches what it missed.",
    };
  if (state === "cancelled")
    return {
      kind: "empty",
      title: "The run was stopped before these values arrived",
      hint: "Generate again to see them.",
    };
  if (readiness === "restarting" && state !== "done")
    return {
      kind: "loading",
      title: "The ranks restart",
      hint: "Values arrive again once the model is back.",
    };
  return null;
}

/** Message of an empty panel that shows `names`; `usual` where nothing is wrong. */
export function emptyState(
  around: Surroundings,
  names: readonly StateName[],
  usual: { readonly title: string; readonly hint: string },
): PanelMessage {
  const { preset } = around.header?.capture ?? {};
  if (preset === "off" && !names.includes("probabilities"))
    return {
      kind: "empty",
      title: "This run captures tokens and candidates only",
      hint: "Choose Default or Lite under Capture for the next run.",
    };
  const off = names.filter((name) => !isCaptured(around.header?.capture, name));
  if (names.length > 0 && off.length === names.length)
    return {
      kind: "empty",
      title: `This run does not capture ${off.map((name) => STATE_NAMES[name]).join(" and ")}`,
      hint: "Switch it on under Capture; it starts with the next token, or with the next run.",
    };
  const obstructed = obstacle(around);
  if (obstructed) return obstructed;
  const reading = around.header?.state === "queued" || around.header?.state === "prefill";
  return { kind: reading ? "loading" : "empty", ...usual };
}

/** Why requested values did not arrive, and whether a retry may help. */
export function refusalState(
  error: ApiError,
  replay: boolean,
  retries: boolean,
): PanelMessage & { readonly again: boolean } {
  if (error.code === "no-such-run")
    return {
      kind: "empty",
      title: "The hub no longer knows this run",
      hint: "It was restarted, or newer runs replaced it. What this page has stays; for more, generate again.",
      again: false,
    };
  if (error.status === 404 && replay)
    return {
      kind: "empty",
      title: "This was not recorded",
      hint: "Only what was opened or pinned while the session was recorded can be shown.",
      again: false,
    };
  const { retryAfterS } = error;
  const final = error.status === 404 || error.status === 409;
  const title = error.status === 429 ? "The model is too busy to provide these values" : error.message;
  const hint =
    retryAfterS === null || !retries
      ? error.hint
      : `${error.hint} The page asks again in ${retryAfterS} s.`.trim();
  return { kind: final ? "empty" : "error", title, hint, again: !final };
}
