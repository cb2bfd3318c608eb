/** Why a panel has nothing to show, in plain words. */
import type { ApiError } from "../../api/client";
import type { Capture, Readiness, RunHeader, StateName } from "../../scope/protocol";

export interface Words {
  readonly kind: "loading" | "empty" | "error";
  readonly title: string;
  readonly hint: string;
}

/** What surrounds a panel. */
export interface Surroundings {
  readonly header: Pick<RunHeader, "state" | "capture" | "error"> | null;
  /** Whether the hub is connected. */
  readonly connected: boolean;
  readonly readiness: Readiness;
}

const NAMES: Readonly<Record<StateName, string>> = {
  qkv: "Q, K, V",
  attention: "attention",
  mlp1: "MLP 1",
  mlp2: "MLP 2",
  probabilities: "probabilities",
  pca: "PCA",
};

/** Whether a run was asked for a state; what it does not tell counts as asked for. */
export function isCaptured(capture: Partial<Capture> | undefined, name: StateName): boolean {
  if (capture?.preset === "off") return name === "probabilities";
  if (capture?.preset === "lite" && name === "mlp1") return false;
  return capture?.states?.[name] !== false;
}

/** What keeps numbers from coming that are not here yet; null: nothing does. */
function hindrance({ header, connected, readiness }: Surroundings): Words | null {
  const state = header?.state;
  if (state === "failed") {
    const { message = "The hub does not know why.", hint = "" } = header?.error ?? {};
    return {
      kind: "error",
      title: "The run failed before these numbers came",
      hint: `${message} ${hint}`.trim(),
    };
  }
  if (!connected)
    return {
      kind: "empty",
      title: "Not known: the connection to the hub is lost",
      hint: "The page connects again by itself and asks for what it missed.",
    };
  if (state === "cancelled")
    return {
      kind: "empty",
      title: "The run was stopped before these numbers came",
      hint: "Generate again to see them.",
    };
  if (readiness === "restarting" && state !== "done")
    return {
      kind: "loading",
      title: "The ranks restart",
      hint: "Numbers come again once the model is back.",
    };
  return null;
}

/** Words of an empty panel that shows `names`; `usual` is said where nothing hinders. */
export function emptyWords(
  around: Surroundings,
  names: readonly StateName[],
  usual: { readonly title: string; readonly hint: string },
): Words {
  const { preset } = around.header?.capture ?? {};
  if (preset === "off" && !names.includes("probabilities"))
    return {
      kind: "empty",
      title: "This run looks at tokens and candidates only",
      hint: "Choose Default or Lite under Look at for the next run.",
    };
  const off = names.filter((name) => !isCaptured(around.header?.capture, name));
  if (names.length > 0 && off.length === names.length)
    return {
      kind: "empty",
      title: `This run does not look at ${off.map((name) => NAMES[name]).join(" and ")}`,
      hint: "Switch it on under Look at; it comes from the next token on, or with the next run.",
    };
  const hindered = hindrance(around);
  if (hindered) return hindered;
  const reading = around.header?.state === "queued" || around.header?.state === "prefill";
  return { kind: reading ? "loading" : "empty", ...usual };
}

/** Why numbers that were asked for did not come, and whether asking again may help. */
export function refusalWords(
  error: ApiError,
  replay: boolean,
  comesAgain: boolean,
): Words & { readonly again: boolean } {
  if (error.code === "no-such-run")
    return {
      kind: "empty",
      title: "The hub no longer knows this run",
      hint: "It was restarted, or newer runs took the room. What the page holds stays; for more, generate again.",
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
  const title = error.status === 429 ? "The model has too much to do to bring these numbers" : error.message;
  const hint =
    retryAfterS === null || !comesAgain
      ? error.hint
      : `${error.hint} The page asks again in ${retryAfterS} s.`.trim();
  return { kind: final ? "empty" : "error", title, hint, again: !final };
}
