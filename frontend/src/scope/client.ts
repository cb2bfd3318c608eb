/** The hub's interface for runs: requests, tiles of attention, exact numbers. Failures are ApiErrors. */
import { ApiError, type ApiClient } from "../api/client";
import type { Schemas } from "../api/types";
import { decodeFrame } from "../wire/frames";
import type { Capture, EarlyHello, RunHeader, RunRequest } from "./protocol";
import { readTensors, type Tensor } from "./tensors/tensors";

export type Format = "json" | "csv" | "npy";

/** The attention of a head, each cell the largest of 2^level x 2^level. */
export interface HeadMap {
  readonly run: string;
  readonly sample: number;
  readonly layer: number;
  readonly head: number;
  readonly level: number;
}

export interface TileAt {
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

export type Lens = Schemas["Lens"];
export type Attribution = Schemas["Attribution"];
export type HeadScores = Schemas["HeadScores"];

/** Answers of the routes of analyses, by their names. */
export interface Analyses {
  readonly lens: Lens;
  readonly attribution: Attribution;
  readonly heads: HeadScores;
}

/** Shortest wait between retries while numbers are computed, also if the hub asks for a shorter one, and the number of retries. */
const SHORTEST_WAIT_MS = 50;
const MOST_TRIES = 120;
/** Tiles that one answer may have. */
export const MOST_TILES = 16;
const JSON_BODY = { "Content-Type": "application/json" };

function tileOf(tensor: Tensor | undefined, name: string): Tile {
  const [rows, columns] = tensor?.shape ?? [];
  if (!(tensor?.data instanceof Uint8Array) || rows === undefined || columns === undefined)
    throw new ApiError(0, `the hub sent no tile ${name}`, "Reload the page.");
  return { rows, columns, values: tensor.data };
}

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

  /** Tiles of attention, at most MOST_TILES, in the order of `at`; waits while probes compute them. */
  async tiles(map: HeadMap, at: readonly TileAt[], signal?: AbortSignal): Promise<Tile[]> {
    const { run, sample, layer, head, level } = map;
    const names = at.map(({ query, key }) => `${query},${key}`);
    const query = names.map((name) => `tile=${name}`).join("&");
    const path = `scope/runs/${encodeURIComponent(run)}/attention/${sample}/${layer}/${head}/${level}?${query}`;
    const response = await this.brought(path, signal, { cache: "default" });
    const tensors = readTensors(decodeFrame(new Uint8Array(await response.arrayBuffer())));
    return names.map((name) => tileOf(tensors.get(name), name));
  }

  /** Exact numbers of a site, of one position or of all; waits while a probe computes them. */
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

  /** Total variance of the hidden states after a layer; waits while a probe computes it. */
  async variance(run: string, layer: number, signal?: AbortSignal): Promise<number> {
    const path = `scope/runs/${encodeURIComponent(run)}/pca/variance?layer=${layer}`;
    const response = await this.brought(path, signal);
    return ((await response.json()) as Schemas["Variance"]).variance;
  }

  /** Requests surprisal and candidates of a prompt's tokens, and waits until they have been sent to all pages. */
  async scores(run: string, sample: number, signal?: AbortSignal): Promise<void> {
    await this.brought(`scope/runs/${encodeURIComponent(run)}/scores?sample=${sample}`, signal);
  }

  /** An analysis of a text of a run; waits while the model reads the text once more. */
  async analysis<K extends keyof Analyses>(
    kind: K,
    run: string,
    query: Readonly<Record<string, string | number | null>>,
    signal?: AbortSignal,
  ): Promise<Analyses[K]> {
    const given = Object.entries(query).filter(([, value]) => value !== null);
    const search = new URLSearchParams(given.map(([key, value]) => [key, String(value)]));
    const response = await this.brought(
      `scope/runs/${encodeURIComponent(run)}/${kind}?${search.toString()}`,
      signal,
    );
    return (await response.json()) as Analyses[K];
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
    throw new ApiError(0, "The values did not arrive.", "The model may be busy; try again.");
  }
}
