import { describe, expect, it } from "vitest";
import { ApiError } from "../../api/client";
import { emptyState, refusalState, type Surroundings } from "./emptyStates";
import { DEFAULT_CAPTURE } from "../../scope/protocol";

describe("words of an empty panel", () => {
  const usual = { title: "No basis yet", hint: "It comes." };
  const around = (change: Partial<Surroundings>): Surroundings => ({
    header: { state: "decoding", capture: DEFAULT_CAPTURE },
    connected: true,
    readiness: "ready",
    ...change,
  });
  const error = { code: "engine-lost", message: "Rank 2 is gone.", hint: "The gang starts again." };

  it("tell what a failed run died of", () => {
    const words = emptyState(around({ header: { state: "failed", error } }), ["pca"], usual);
    expect(words).toMatchObject({ kind: "error", hint: "Rank 2 is gone. The gang starts again." });
  });

  it("tell a lost connection, ranks that restart, a stopped run, and what is switched off", () => {
    const title = (change: Partial<Surroundings>): string => emptyState(around(change), ["pca"], usual).title;
    expect(title({ connected: false })).toContain("connection to the hub is lost");
    expect(title({ readiness: "restarting" })).toBe("The ranks restart");
    expect(title({ header: { state: "cancelled" } })).toContain("stopped");
    const off = { ...DEFAULT_CAPTURE, states: { ...DEFAULT_CAPTURE.states, pca: false } };
    expect(title({ header: { state: "done", capture: off } })).toBe("This run does not capture PCA");
    expect(title({ header: { state: "done", capture: { preset: "off" } } })).toContain("candidates only");
    expect(title({})).toBe("No basis yet");
  });

  it("wait while a prompt is read", () => {
    expect(emptyState(around({ header: { state: "prefill" } }), ["pca"], usual).kind).toBe("loading");
  });
});

describe("words of a refusal", () => {
  const refused = (status: number, code: string, retry: number | null = null): ApiError =>
    new ApiError(status, "said by the hub", "with a hint.", { code }, retry);

  it("tell a run that the hub lost, what was not recorded, and when the page asks again", () => {
    const words = (error: ApiError, replay = false) =>
      refusalState(error, replay, error.retryAfterS !== null);
    expect(words(refused(404, "no-such-run"))).toMatchObject({ kind: "empty", again: false });
    expect(words(refused(404, "not-recorded"), true).title).toBe("This was not recorded");
    expect(words(refused(404, "outside"))).toMatchObject({ title: "said by the hub", again: false });
    expect(words(refused(429, "too-many", 7))).toMatchObject({
      kind: "error",
      hint: "with a hint. The page asks again in 7 s.",
    });
    expect(words(refused(503, "probe-incomplete"))).toMatchObject({ title: "said by the hub", again: true });
    expect(words(refused(409, "run-incomplete"))).toMatchObject({ kind: "empty", again: false });
    expect(refusalState(refused(503, "probe-incomplete", 1), false, false).hint).toBe("with a hint.");
  });
});
