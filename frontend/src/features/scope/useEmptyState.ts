/** Messages of empty panels of the scope screen. */
import type { StateName } from "../../scope/protocol";
import { emptyState, type PanelMessage } from "./emptyStates";
import { useScope } from "./useScope";

export function useEmptyState(): (names: readonly StateName[], title: string, hint: string) => PanelMessage {
  const { version, run, live, status, hello } = useScope();
  return (names, title, hint) =>
    emptyState(
      {
        header: version.value >= 0 ? (run.value?.header ?? null) : null,
        connected: live.value.kind !== "lost",
        readiness: status.value?.state ?? hello.value?.state ?? "ready",
      },
      names,
      { title, hint },
    );
}
