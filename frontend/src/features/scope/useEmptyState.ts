/** What empty panels of the scope screen say. */
import type { StateName } from "../../scope/protocol";
import { emptyWords, type Words } from "./emptyStates";
import { useScope } from "./useScope";

export function useEmptyState(): (names: readonly StateName[], title: string, hint: string) => Words {
  const { version, run, live, status, hello } = useScope();
  return (names, title, hint) =>
    emptyWords(
      {
        header: version.value >= 0 ? (run.value?.header ?? null) : null,
        connected: live.value.kind !== "lost",
        readiness: status.value?.state ?? hello.value?.state ?? "ready",
      },
      names,
      { title, hint },
    );
}
