/** Colour scales that the user fixed: while tokens stream, a colour keeps its value. */
import { ref, watch, type Ref } from "vue";
import { fixedDomain, type Domain } from "../../../scope/views/matrices";

export interface DomainLock {
  readonly locked: Ref<boolean>;
  /** The scale of `key` for these numbers: the fixed one, or what `fresh` makes of them. */
  readonly domain: (
    key: string,
    values: readonly number[],
    fresh: (values: readonly number[]) => Domain,
  ) => Domain;
}

export function useDomainLock(): DomainLock {
  const locked = ref(false);
  const domains = new Map<string, Domain>();
  watch(locked, (now) => now || domains.clear(), { flush: "sync" });
  return {
    locked,
    domain: (key, values, fresh) => {
      const known = locked.value ? domains.get(key) : undefined;
      const found = known ? fixedDomain(known, values) : fresh(values);
      domains.set(key, found);
      return found;
    },
  };
}
