/**
 * Logs this browser in with the code in the fragment of the address, which reaches no server and no log. The code is
 * exchanged for a cookie that scripts cannot read, and removed from the address bar before anything else happens.
 */
import { readonly, shallowRef } from "vue";

/** Why the code did not log in: it was used or is too old, a page of another site led here, or the server could not. */
export type LoginTrouble = "stale" | "elsewhere" | "failed";

/** What logging in needs of the browser; tests pass their own. */
export interface LoginWorld {
  readonly location: Pick<Location, "hash" | "pathname" | "search">;
  readonly history: Pick<History, "replaceState" | "state">;
  readonly document: Pick<Document, "querySelector">;
  readonly fetch: typeof globalThis.fetch;
}

/** The page is not shown before the answer. */
const ANSWER_MS = 10_000;

const trouble = shallowRef<LoginTrouble | null>(null);

/** The code in an address's fragment, if it has one. */
export const codeOf = (hash: string): string | null => new URLSearchParams(hash.slice(1)).get("code");

/** Set by the server on a page that a link of another site opened: its code may be an attacker's. */
const ELSEWHERE = 'meta[name="megatronapp-led-from"][content="elsewhere"]';

/** Uses the code of the address, if there is one. */
export async function useCode({ location, history, document, fetch }: LoginWorld): Promise<void> {
  const code = codeOf(location.hash);
  if (code === null) return;
  history.replaceState(history.state, "", location.pathname + location.search);
  if (document.querySelector(ELSEWHERE) !== null) {
    trouble.value = "elsewhere";
    return;
  }
  const body = new URLSearchParams({ token: code });
  const signal = AbortSignal.timeout(ANSWER_MS);
  const answer = await fetch("login", { method: "POST", body, signal }).catch(() => null);
  trouble.value = answer?.ok === true ? null : answer?.status === 401 ? "stale" : "failed";
}

/** Reloads the page when an address with a code is pasted into an open one. */
export function watchCode(world: Window): void {
  world.addEventListener("hashchange", () => {
    if (codeOf(world.location.hash) !== null) world.location.reload();
  });
}

export const useLoginTrouble = () => readonly(trouble);
