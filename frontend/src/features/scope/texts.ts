/** Texts of the scope screens. */
import type { AxesSource, Gap, Hello, RunState, RunSummary, StateName } from "../../scope/protocol";
import { duration, rankList } from "../../store/format";
import type { SampleStore } from "../../scope/store/sampleStore";
import { pieces } from "../../scope/views/tokenText";

const TITLE_LENGTH = 40;

export const STATE_NAMES: Readonly<Record<StateName, string>> = {
  qkv: "Q, K, V",
  attention: "attention",
  mlp1: "MLP 1",
  mlp2: "MLP 2",
  probabilities: "probabilities",
  pca: "PCA",
};

const shortened = (text: string): string => {
  const line = text.replaceAll(/\s+/g, " ").trim();
  const signs = [...line];
  return signs.length > TITLE_LENGTH ? `${signs.slice(0, TITLE_LENGTH - 1).join("")}…` : line || "(empty)";
};

export const promptTitle = (sample: SampleStore): string => shortened(sample.promptText);

/** What the axes of principal components were fitted on. */
export const axesTitle = ({ run, tokens }: AxesSource, shown: string | null): string =>
  `from ${run === shown ? "this run" : `run ${run.slice(0, 6)}`}, ${tokens} token${tokens === 1 ? "" : "s"}`;

export const RUN_STATES: Readonly<Record<RunState, string>> = {
  queued: "Queued",
  prefill: "Reading the prompts",
  decoding: "Generating",
  done: "Done",
  cancelled: "Stopped",
  failed: "Failed",
};

/** One line of the list of runs. */
export function runTitle({ run, state, prompts, perturbation }: RunSummary): string {
  const [first] = Array.isArray(prompts) ? (prompts as readonly (string | { text: string })[]) : [];
  const text = typeof first === "string" ? first : first?.text;
  return `${run.slice(0, 6)} ${text === undefined ? "" : `“${shortened(text)}” `}(${RUN_STATES[state].toLowerCase()}${perturbation ? ", perturbed" : ""})`;
}

/** Why the user cannot generate here; null: they can. */
export function whyNot(hello: Hello, state: string): string | null {
  if (hello.source === "replay")
    return "This is a recorded session: it can be viewed, but nothing new can be generated.";
  if (hello.role !== "controller")
    return `You may view, but not generate: that needs the controller role. On a cluster, users who may update the job have it; on a laptop, it belongs to the page that \`megatronapp ui ${hello.job}\` opens.`;
  if (state === "restarting") return "The ranks restart. Generating works again once the model is back.";
  if (state === "gone") return "The model no longer serves.";
  return null;
}

/** Of one, and of several. */
const WHAT: Readonly<Record<Gap["what"], readonly [string, string]>> = {
  step: ["step", "steps"],
  rows: ["row of pinned heads", "rows of pinned heads"],
  overview: ["overview", "overviews"],
  ranks: ["step of some ranks", "steps of some ranks"],
};
const REASONS: Readonly<Record<Gap["reason"], string>> = {
  slow: "this page was slower than the model",
  late: "their ranks did not report in time, or have ended",
  restart: "the hub was restarted",
  old: "the hub needed the space for newer ones",
  large: "no message is large enough for them",
};

/** Title and hint when a lost connection is back. */
export function backText(
  back: { seconds: number; known: boolean; restarted: boolean | null },
  missed: readonly Gap[],
): { title: string; hint: string } {
  const title = `Connected again after ${duration(back.seconds)}.`;
  const gaps = gapText(missed)?.title;
  if (!back.known) {
    const why =
      back.restarted === false
        ? "The hub keeps its newest runs and has dropped this one"
        : "The hub was restarted and no longer knows this run";
    return { title, hint: `${why}: the page shows what it has.` };
  }
  if (!back.restarted) return { title, hint: gaps ?? "Nothing was missed." };
  const restarted = "The hub was restarted; earlier values are those that this page has.";
  return { title, hint: gaps ? `${restarted} ${gaps}` : restarted };
}

/** What is missing in a run, in one sentence; null: nothing. */
export function gapText(gaps: readonly Gap[]): { title: string; hint: string } | null {
  const last = gaps.at(-1);
  if (!last) return null;
  const ranks = [...new Set(gaps.flatMap((gap) => gap.ranks ?? []))].sort((a, b) => a - b);
  const whose = ranks.length > 0 ? ` (${rankList(ranks)})` : "";
  const count = gaps.reduce((sum, { from, to }) => sum + Math.max(1, (to ?? 0) - (from ?? 0) + 1), 0);
  return {
    title: `${count} ${WHAT[last.what][count === 1 ? 0 : 1]} ${count === 1 ? "was" : "were"} skipped${whose}: ${REASONS[last.reason] ?? last.reason}.`,
    hint: "Their places are hatched.",
  };
}

const ROOM_PX = { flat: 22, most: 66, margin: 14, each: 6.5 };
const LOOKED_AT = 200;

/** Pixels above a picture for the names of tokens: short ones are horizontal, others vertical. */
export function labelRoom(sample: SampleStore | null, length: number): number {
  const labels = sample ? pieces(sample, 0, Math.min(length, LOOKED_AT)) : [];
  const longest = Math.max(0, ...labels.map(({ label }) => label.length));
  return longest <= 2
    ? ROOM_PX.flat
    : Math.min(ROOM_PX.most, Math.ceil(ROOM_PX.margin + longest * ROOM_PX.each));
}
