/** Where a refused request is wrong, as the hub reports it. */
import type { ApiError } from "../api/client";

export interface ProblemPlace {
  /** Path in the request: `capture.expression.qkv`. */
  readonly path: string;
  readonly message: string;
  /** Of an expression, in characters from 1. */
  readonly column: number | null;
}

const COLUMN = /column (\d+)/;

const first = (given: Record<string, unknown>, names: readonly string[]): unknown =>
  names.map((name) => given[name]).find((value) => value !== undefined);

function placeOf(entry: unknown, fallback: string): ProblemPlace[] {
  if (typeof entry !== "object" || entry === null) return [];
  const given = entry as Record<string, unknown>;
  const path = first(given, ["place", "path", "loc"]) ?? "";
  const message = String(first(given, ["message", "msg"]) ?? fallback);
  const column = Number(given["column"] ?? COLUMN.exec(message)?.[1]);
  const text = Array.isArray(path) ? path.join(".") : String(path);
  return [{ path: text.replace(/^body\./, ""), message, column: Number.isInteger(column) ? column : null }];
}

/** `path: sentence` of a message that names its places itself; sentences may hold semicolons. */
function fromMessage(message: string): ProblemPlace[] {
  return message.split(/;\s+(?=[a-zA-Z]+[.[\]\w]*: )|\n/).flatMap((part) => {
    const found = /^(?:body\.)?([a-zA-Z]+(?:[.[\]\w]+)*): (.*)$/.exec(part);
    return found ? placeOf({ path: found[1], message: found[2] }, part) : [];
  });
}

export function problemPlaces(error: ApiError | null): readonly ProblemPlace[] {
  if (error?.status !== 422) return [];
  const { places } = error.body;
  if (!Array.isArray(places)) return fromMessage(error.message);
  return places.flatMap((entry) => placeOf(entry, error.message));
}

/** The place of a field, if it is wrong. */
export const placeAt = (places: readonly ProblemPlace[], path: string): ProblemPlace | undefined =>
  places.find((place) => place.path === path || place.path.startsWith(`${path}.`));
