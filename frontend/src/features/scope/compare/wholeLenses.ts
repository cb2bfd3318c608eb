/** Recorded lenses that panels can show. */
import type { RecordedSession } from "../../../scope/session/recordedSession";

/**
 * The session without lenses of some layers, which a script may have requested: panels take the place of a row for its
 * layer, and would show those as layers 0, 1 and so on.
 */
export function withWholeLenses(session: RecordedSession): RecordedSession {
  const { layers } = session.hello.model;
  const analyses = session.analyses.filter(({ header }) => {
    const rows = header["layers"];
    return header["kind"] !== "lens" || (Array.isArray(rows) && rows.length === layers);
  });
  return { ...session, analyses };
}
