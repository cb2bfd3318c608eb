/** Answers of a saved session in the place of a hub's: what was not recorded is an ApiError, as a replay answers it. */
import { ApiClient, ApiError } from "../../api/client";
import { ScopeClient, type Analyses, type HeadMap, type Tile, type TileAt } from "../client";
import { TILE } from "../store/tileStore";
import { recordedLens } from "./recordedLens";
import type { RecordedSession } from "./recordedSession";

const PROBLEM = {
  code: "not-recorded",
  message: "This was not recorded",
  hint: "A session holds what was viewed while it was recorded; `megatronapp scope replay FILE` serves its exact numbers.",
};
const notRecorded = (): ApiError => new ApiError(404, PROBLEM.message, PROBLEM.hint, PROBLEM);

export class RecordedClient extends ScopeClient {
  constructor(readonly session: RecordedSession) {
    super(new ApiClient(() => Promise.resolve(Response.json(PROBLEM, { status: 404 })), ""));
  }

  override tiles(map: HeadMap, at: readonly TileAt[]): Promise<Tile[]> {
    return new Promise((resolve) => resolve(at.map((place) => this.tile(map, place))));
  }

  override analysis<K extends keyof Analyses>(
    kind: K,
    _run: string,
    query: Readonly<Record<string, string | number | null>>,
  ): Promise<Analyses[K]> {
    if (kind !== "lens") return Promise.reject(notRecorded());
    const [first = 0, last = 0] = String(query["positions"]).split("-").map(Number);
    const token = query["token"] ?? null;
    const found = recordedLens(this.session.analyses, {
      sample: Number(query["sample"]),
      first,
      end: last + 1,
      token: token === null ? null : Number(token),
    });
    return found ? Promise.resolve(found as Analyses[K]) : Promise.reject(notRecorded());
  }

  /** The largest of 2^level x 2^level cells. Throws ApiError where a row is missing. */
  private tile({ run, sample, layer, head, level }: HeadMap, { query, key }: TileAt): Tile {
    const store = this.session.store.runs.get(run)?.samples[sample];
    const [scale, size] = [2 ** level, TILE * 2 ** level];
    const read = Math.min(store?.read ?? 0, (query + 1) * size);
    const rows = Math.ceil((read - query * size) / scale);
    const columns = Math.min(TILE, Math.ceil(((store?.read ?? 0) - key * size) / scale));
    if (!store || rows <= 0 || columns <= 0) throw notRecorded();
    const values = new Uint8Array(rows * columns);
    for (let position = query * size; position < read; position += 1) {
      const keys = store.attentionRow(layer, head, position);
      if (!keys) throw notRecorded();
      const row = Math.floor((position - query * size) / scale) * columns;
      keys.subarray(key * size, (key + 1) * size).forEach((value, at) => {
        const cell = row + Math.floor(at / scale);
        values[cell] = Math.max(values[cell] ?? 0, value);
      });
    }
    return { rows, columns, values };
  }
}
