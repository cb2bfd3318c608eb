/** The hub's interface for runs: requests, tiles of attention, exact numbers. Failures are ApiErrors. */
import { ApiError, type ApiClient } from "../api/client";
import type { Capture, EarlyHello, RunHeader, RunRequest } from "./protocol";

export type Format = "json" | "csv" | "npy";

export interface TilePlace {
  readonly run: string;
  readonly sample: number;
  readonly layer: number;
  readonly head: number;
  readonly level: number;
  readonly query: number;
  readonly key: number;
}

export interface Tile {
  readonly rows: number;
  readonly columns: number;
  /** `u8s`, row by row. */
  readonly values: Uint8Array;
}

export interface ValuePlace {
  readonly run: string;
  readonly site: string;
  readonly sample: number;
  readonly layer?: number | undefined;
  readonly head?: number | undefined;
  readonly position?: number | undefined;
  /** Of q and k: before or after the rotation of positions. */
  readonly rotary?: "before" | "after" | undefined;
}

/** Waits while numbers are brought are at least this long, whatever the hub says, and end after so many. */
const SHORTEST_WAIT_MS = 50;
const MOST_TRIES = 120;
const JSON_BODY = { "Content-Type": "application/json" };

export type Wait = (ms: number, signal: AbortSignal | undefined) => Promise<void>;

const sleep: Wait = (ms, signal) =>
  new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    const stop = (): void => {
      clearTimeout(timer);
      reject(new DOMException("no longer wanted", "AbortError"));
    };
    signal?.addEventListener("abort", stop, { once: true });
  });

export class ScopeClient {
  constructor(
    readonly api: ApiClient,
    private readonly wait: Wait = sleep,
  ) {}

  hello = async (signal?: AbortSignal): Promise<EarlyHello> => this.json("scope", signal ? { signal } : {});

  start = async (request: RunRequest): Promise<{ run: string; position: number | null }> =>
    this.json("scope/runs", { method: "POST", headers: JSON_BODY, body: JSON.stringify(request) });

  stop = async (run: string): Promise<void> => {
    await this.send(`scope/runs/${encodeURIComponent(run)}`, { method: "DELETE" });
  };

  setCapture = async (run: string, capture: Capture): Promise<void> => {
    const body = JSON.stringify({ capture });
    await this.send(`scope/runs/${encodeURIComponent(run)}`, { method: "PATCH", headers: JSON_BODY, body });
  };

  run = async (run: string, signal?: AbortSignal): Promise<RunHeader> =>
    this.json(`scope/runs/${encodeURIComponent(run)}`, signal ? { signal } : {});

  refit = async (run: string, layers: readonly number[]): Promise<void> => {
    const body = JSON.stringify({ layers, refit: true });
    await this.send(`scope/runs/${encodeURIComponent(run)}/pca`, {
      method: "POST",
      headers: JSON_BODY,
      body,
    });
  };

  /** A tile of attention; waits while a probe brings it. */
  async tile(place: TilePlace, signal?: AbortSignal): Promise<Tile> {
    const { run, sample, layer, head, level, query, key } = place;
    const path = `scope/runs/${encodeURIComponent(run)}/attention/${sample}/${layer}/${head}/${level}/${query}/${key}`;
    const response = await this.brought(path, signal, { cache: "default" });
    const [rows = 0, columns = 0] = (response.headers.get("X-Tile-Shape") ?? "").split(",").map(Number);
    const values = new Uint8Array(await response.arrayBuffer());
    if (rows * columns !== values.length)
      throw new ApiError(0, `a tile of ${values.length} bytes says ${rows} x ${columns}`, "Reload the page.");
    return { rows, columns, values };
  }

  /** Exact numbers of a site, of one position or of all; waits while a probe brings them. */
  async values(place: ValuePlace, format: Format, signal?: AbortSignal): Promise<Response> {
    const { run, site, ...rest } = place;
    const given = Object.entries(rest).filter(([, value]) => value !== undefined);
    const query = new URLSearchParams([
      ...given.map(([key, value]) => [key, String(value)]),
      ["format", format],
    ]);
    return this.brought(
      `scope/runs/${encodeURIComponent(run)}/values/${encodeURIComponent(site)}?${query.toString()}`,
      signal,
    );
  }

  sessionAddress = (run: string): string => `${this.api.root}scope/runs/${encodeURIComponent(run)}/session`;

  private send(path: string, init: RequestInit): Promise<Response> {
    return this.api.send(this.api.root + path, init);
  }

  private async json<T>(path: string, init: RequestInit): Promise<T> {
    return (await (await this.send(path, init)).json()) as T;
  }

  private async brought(
    path: string,
    signal: AbortSignal | undefined,
    init: RequestInit = {},
  ): Promise<Response> {
    for (let tries = 0; tries < MOST_TRIES; tries += 1) {
      const response = await this.send(path, signal ? { ...init, signal } : init);
      if (response.status !== 202) return response;
      const { retryMs } = (await response.json()) as { retryMs?: number };
      await this.wait(Math.max(SHORTEST_WAIT_MS, retryMs ?? 0), signal);
    }
    throw new ApiError(0, "The numbers did not come.", "The model may be busy; try again.");
  }
}
