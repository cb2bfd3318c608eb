import { describe, expect, it } from "vitest";
import { domainOf } from "../../../scope/views/matrices";
import { useDomainLock } from "./useDomainLock";

describe("useDomainLock", () => {
  const fresh = (values: readonly number[]) => domainOf(values, false);

  it("keeps the ends of a scale while it is held, one for each key, and lets them go after", () => {
    const { locked, domain } = useDomainLock();
    const first = domain("norm", [0, 4], fresh);
    locked.value = true;
    expect(domain("norm", [0, 90, 100], fresh)).toMatchObject({ high: first.high, clipped: 2 });
    expect(domain("cosine", [0, 1], fresh)).not.toMatchObject({ high: first.high + 90 });
    locked.value = false;
    expect(domain("norm", [0, 90, 100], fresh).high).toBeGreaterThan(first.high);
  });
});
