/** Thin client of a hub, directly or behind a gateway: same origin, cookie, JSON. Every failure is an ApiError that says what to do. */
import type {
  CapturedStepDetails,
  ProbeAttention,
  ProbeResult,
  Probes,
  Captures,
  Quantity,
  GatewayJob,
  Fault,
  FaultRequest,
  Heatmap,
  HistoryView,
  JobEntry,
  JobView,
  LeaseGrant,
  LeaseRequest,
  Metric,
  OrderRequest,
  OrderView,
  ForwardBackwardView,
  PipelineView,
  Problem,
  Series,
  StepView,
  Timeline,
  Verdict,
} from "./types";

/** An answer that is not a success; status 0 means that the hub was not reached. */
export class ApiError extends Error {
  override readonly name = "ApiError";

  constructor(
    readonly status: number,
    message: string,
    readonly hint: string,
    /** The whole body of the answer: some errors have more fields. */
    readonly body: Readonly<Record<string, unknown>> = {},
    /** Seconds after which to retry, if the answer has them. */
    readonly retryAfterS: number | null = null,
  ) {
    super(message);
  }

  /** Code for programs: `queue-full`, `not-recorded`. */
  get code(): string | null {
    const { code } = this.body;
    return typeof code === "string" ? code : null;
  }
}

/** The whole text of an error: message and hint. */
export function errorText({ message, hint, retryAfterS }: ApiError): string {
  const again = retryAfterS === null ? "" : `Try again in ${retryAfterS} s.`;
  const sentence = /[.!?]$/.test(message) ? message : `${message}.`;
  return [sentence, hint, again].filter((part) => part !== "").join(" ");
}

/** Seconds of a `Retry-After`; null where there is none, or a date. */
function retryAfter(response: Response): number | null {
  const text = response.headers.get("Retry-After");
  return text !== null && /^\d{1,5}$/.test(text.trim()) ? Number(text) : null;
}

export type Query = Record<string, string | number | readonly number[] | undefined>;
type Fetch = typeof globalThis.fetch;

export interface StepRange {
  readonly from?: number | undefined;
  readonly to?: number | undefined;
}

/** Root of the interface of a hub, or of a gateway. */
export const ROOT = "api/v1/";

/** Root at a gateway of the interface of a job's hub (`namespace/name`). */
export const rootOf = (job: string): string => `${ROOT}jobs/${job}/`;

function withQuery(path: string, query: Query): string {
  const given = Object.entries(query).flatMap(([key, value]) =>
    value === undefined ? [] : [value].flat().map((each) => [key, String(each)]),
  );
  return given.length === 0 ? path : `${path}?${new URLSearchParams(given).toString()}`;
}

async function problemOf(response: Response): Promise<ApiError> {
  const fallback = `the hub answered ${response.status} ${response.statusText}`.trim();
  const body = (await response.json().catch(() => null)) as Partial<Problem> | null;
  return new ApiError(
    response.status,
    body?.message ?? fallback,
    body?.hint ?? "Try again, or check the hub's log.",
    { ...body },
    retryAfter(response),
  );
}

/** The hub's interface; `fetch` is injected so that tests need no network. */
export class ApiClient {
  constructor(
    private readonly fetch: Fetch = (input, init) => globalThis.fetch(input, init),
    readonly root: string = ROOT,
  ) {}

  /** Chrome trace of one step: a link to load it from. */
  traceAddress = (step: number): string => withQuery(`${this.root}trace`, { from: step, to: step });

  /** Perfetto trace of about 1 MB around the evidence of a verdict. */
  verdictTraceAddress = (verdict: string): string =>
    withQuery(`${this.root}trace`, { verdict, format: "perfetto" });

  jobs = (signal?: AbortSignal): Promise<JobEntry[]> => this.get("jobs", {}, signal);
  gatewayJobs = (signal?: AbortSignal): Promise<GatewayJob[]> => this.get("jobs", {}, signal);
  job = (signal?: AbortSignal): Promise<JobView> => this.get("job", {}, signal);
  verdicts = (signal?: AbortSignal): Promise<Verdict[]> => this.get("verdicts", {}, signal);

  steps = (range: StepRange, signal?: AbortSignal): Promise<StepView[]> =>
    this.get("steps", { ...range }, signal);

  series = (name: string, range: StepRange, signal?: AbortSignal): Promise<Series> =>
    this.get("metrics/series", { name, ...range }, signal);

  heatmap = (metric: Metric, range: StepRange, signal?: AbortSignal): Promise<Heatmap> =>
    this.get("heatmap", { metric, ...range }, signal);

  /** All spans of a step, or with `bounds` (`pixels`, ...) those that a picture shows. */
  timeline = (step: number, signal?: AbortSignal, bounds: Query = {}): Promise<Timeline> =>
    this.get("timeline", { step, ...bounds }, signal);

  /** Hours and steps whose spans are stored. */
  history = (signal?: AbortSignal): Promise<HistoryView> => this.get("history", {}, signal);

  forwardBackward = (signal?: AbortSignal): Promise<ForwardBackwardView> =>
    this.get("forward-backward", {}, signal);

  pipeline = (signal?: AbortSignal): Promise<PipelineView> => this.get("pipeline", {}, signal);

  captures = (site: string, quantity: Quantity, signal?: AbortSignal): Promise<Captures> =>
    this.get("training/captures", { site, quantity }, signal);

  capturedStep = (step: number, signal?: AbortSignal): Promise<CapturedStepDetails> =>
    this.get(`training/captures/${step}`, {}, signal);

  probes = (signal?: AbortSignal): Promise<Probes> => this.get("training/probes", {}, signal);

  probeResult = (step: number, text: number, signal?: AbortSignal): Promise<ProbeResult> =>
    this.get(`training/probes/${step}/${text}`, {}, signal);

  probeAttention = (
    step: number,
    text: number,
    layer: number,
    head: number,
    signal?: AbortSignal,
  ): Promise<ProbeAttention> =>
    this.get(`training/probes/${step}/${text}/attention`, { layer, head }, signal);

  addFault = (fault: FaultRequest): Promise<Fault> => this.post("faults", fault);

  /** Take, renew or release the control of the training. */
  controlTraining = (request: LeaseRequest): Promise<LeaseGrant> => this.post("training/lease", request);

  orderTraining = (order: OrderRequest): Promise<OrderView> => this.post("training/orders", order);

  endFault = async (id: string): Promise<void> => {
    await this.send(`${this.root}faults/${encodeURIComponent(id)}`, { method: "DELETE" });
  };

  private get<T>(path: string, query: Query, signal: AbortSignal | undefined): Promise<T> {
    return this.request<T>(path, signal ? { signal } : {}, query);
  }

  private post<T>(path: string, body: object): Promise<T> {
    return this.request<T>(path, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
    });
  }

  private async request<T>(path: string, init: RequestInit, query: Query = {}): Promise<T> {
    const response = await this.send(withQuery(this.root + path, query), init);
    return (await response.json()) as T;
  }

  /** An answer that is a success; throws ApiError. `url` begins with `root`. */
  async send(url: string, init: RequestInit): Promise<Response> {
    let response: Response;
    try {
      response = await this.fetch(url, { credentials: "same-origin", cache: "no-store", ...init });
    } catch (error) {
      if (init.signal?.aborted) throw error;
      throw new ApiError(
        0,
        "The hub does not answer.",
        "Check with `megatronapp get` whether the job is still running.",
      );
    }
    if (!response.ok) throw await problemOf(response);
    return response;
  }
}

/** True if `error` only means that the request was cancelled. */
export const isAbort = (error: unknown): boolean =>
  error instanceof DOMException && error.name === "AbortError";

/** Any thrown value as an ApiError, for the error state of a panel. */
export const asApiError = (error: unknown): ApiError =>
  error instanceof ApiError ? error : new ApiError(0, String(error), "Reload the page.");
