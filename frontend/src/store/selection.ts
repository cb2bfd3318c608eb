/** The one selection that drives all panels, and its form in the URL. */
import { METRICS, type Metric } from "../api/types";

export interface Selection {
  /** `namespace/name` of a job behind a gateway; null: the list of jobs, or the only job of a hub. */
  readonly job: string | null;
  /** null: the newest finished step. */
  readonly step: number | null;
  readonly rank: number | null;
  /** Index of a span in the timeline of the selected step. */
  readonly span: number | null;
  readonly metric: Metric;
  readonly page: "job" | "jobs" | "scope" | null;
  /** Of MegaScope: null is the newest run. */
  readonly run: string | null;
  /** The run to compare with, and the name of the session file that it is in; null: none, or of this hub. */
  readonly with: string | null;
  readonly file: string | null;
  readonly side: Side;
  readonly view: ScopeView;
  readonly prompt: number;
  /** Position of a token; null follows the newest. */
  readonly token: number | null;
  readonly layer: number | null;
  readonly head: number | null;
}

export const SCOPE_VIEWS = ["layers", "attention", "probabilities", "pca", "lens", "lab"] as const;
export type ScopeView = (typeof SCOPE_VIEWS)[number];

/** What a comparison of runs A and B shows. */
export const SIDES = ["difference", "a", "b", "both"] as const;
export type Side = (typeof SIDES)[number];

export const NOTHING: Selection = {
  job: null,
  step: null,
  rank: null,
  span: null,
  metric: "slowdown",
  page: null,
  run: null,
  with: null,
  file: null,
  side: "difference",
  view: "layers",
  prompt: 0,
  token: null,
  layer: null,
  head: null,
};
const KEYS = Object.keys(NOTHING) as (keyof Selection)[];
const RUN = /^[0-9a-f]{12}$/;

const LABEL = "[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?";
const JOB = new RegExp(`^${LABEL}/${LABEL}$`);

function natural(text: string | null): number | null {
  return text !== null && /^\d{1,12}$/.test(text) ? Number(text) : null;
}

/** Selection in a query string; whatever cannot be read counts as absent. */
export function parseSelection(query: string): Selection {
  const parameters = new URLSearchParams(query);
  const metric = METRICS.find((name) => name === parameters.get("metric")) ?? NOTHING.metric;
  const page = parameters.get("page");
  const step = natural(parameters.get("step"));
  const runOf = (name: string): string | null => {
    const run = parameters.get(name);
    return run !== null && RUN.test(run) ? run : null;
  };
  const job = parameters.get("job");
  return {
    job: job !== null && JOB.test(job) ? job : null,
    step,
    rank: natural(parameters.get("rank")),
    span: step === null ? null : natural(parameters.get("span")),
    metric,
    page: page === "job" || page === "jobs" || page === "scope" ? page : null,
    run: runOf("run"),
    with: runOf("with"),
    file: runOf("with") === null ? null : parameters.get("file"),
    side: SIDES.find((name) => name === parameters.get("side")) ?? NOTHING.side,
    view: SCOPE_VIEWS.find((name) => name === parameters.get("view")) ?? NOTHING.view,
    prompt: natural(parameters.get("prompt")) ?? 0,
    token: natural(parameters.get("token")),
    layer: natural(parameters.get("layer")),
    head: natural(parameters.get("head")),
  };
}

/** Query string of a selection, without default values. */
export function formatSelection(selection: Selection): string {
  const parameters = new URLSearchParams();
  for (const key of KEYS) {
    const value = selection[key];
    if (value !== null && value !== NOTHING[key]) parameters.set(key, String(value));
  }
  const text = parameters.toString();
  return text === "" ? "" : `?${text}`;
}
