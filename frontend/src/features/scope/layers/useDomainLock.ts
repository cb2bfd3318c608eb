/** Colour scales that a person holds: while tokens stream, a colour keeps its number. */
import { ref, watch, type Ref } from "vue";
import { heldDomain, type Domain } from "../../../scope/views/matrices";

export interface DomainLock {
  readonly locked: Ref<boolean>;
  /** The scale of `key` for these numbers: the one that is held, or what `fresh` makes of them. */
  readonly domain: (
    key: string,
    values: readonly number[],
    fresh: (values: readonly number[]) => Domain,
  ) => Domain;
}

export function useDomainLock(): DomainLock {
  const locked = ref(false);
  const held = new Map<string, Domain>();
  watch(locked, (now) => now || held.clear(), { flush: "sync" });
  return {
    locked,
    domain: (key, values, fresh) => {
      const known = locked.value ? held.get(key) : undefined;
      const found = known ? heldDomain(known, values) : fresh(values);
      held.set(key, found);
      return found;
    },
  };
}
