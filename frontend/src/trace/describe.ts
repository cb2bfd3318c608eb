/** Spans in words, and how a span compares with the same work on its peers. Pure. */
import type { RankView } from "../api/types";
import { spanStyle } from "./kinds";
import { spanAt, type SpanView, type TimelineModel } from "./timeline";

/** "Forward, microbatch 2, chunk 1" */
export function spanTitle(span: SpanView): string {
  const parts = [spanStyle(span).label];
  if (span.microbatch !== null) parts.push(`microbatch ${span.microbatch}`);
  if (span.chunk > 0) parts.push(`chunk ${span.chunk}`);
  return parts.join(", ");
}

/** Why a pass is where it is, if its plan has it elsewhere. */
export function orderNote(span: SpanView): string {
  return span.early ? "before its turn: the planned pass had no input yet" : "";
}

export interface PeerSpan {
  readonly rank: number;
  readonly index: number;
  readonly durationNs: number;
}

/** The same work (kind, chunk, microbatch) on the ranks of the same pipeline stage, by rank; alone where there are none. */
export function peerSpans(model: TimelineModel, span: SpanView, ranks: readonly RankView[]): PeerSpan[] {
  const own = ranks.find((rank) => rank.rank === span.rank);
  const peers = new Set(
    ranks.filter((rank) => rank.pp === own?.pp && rank.role === own.role).map((rank) => rank.rank),
  );
  const found = new Map<number, PeerSpan>();
  for (const lane of model.lanes) {
    if (!peers.has(lane.rank)) continue;
    for (const index of lane.main) {
      const other = spanAt(model.source, index);
      if (
        !other ||
        other.kind !== span.kind ||
        other.chunk !== span.chunk ||
        other.microbatch !== span.microbatch
      )
        continue;
      const chosen = lane.rank === span.rank ? index === span.index : !found.has(lane.rank);
      if (chosen) found.set(lane.rank, { rank: lane.rank, index, durationNs: other.durationNs });
    }
  }
  return [...found.values()];
}
