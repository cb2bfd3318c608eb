import { beforeEach, describe, expect, it, vi } from "vitest";
import { codeOf, useCode, useLoginTrouble, type LoginWorld } from "./login";

const MARK = '<meta name="megatronapp-led-from" content="elsewhere">';

function worldAt(url: string, status: number | null = 200) {
  window.history.replaceState({ kept: 1 }, "", url);
  const asked: { url: string; method: string; body: string; shown: string }[] = [];
  const fetch = vi.fn((input: RequestInfo | URL, init?: RequestInit) => {
    const body = init?.body instanceof URLSearchParams ? init.body.toString() : "";
    asked.push({ url: input as string, method: init?.method ?? "GET", body, shown: window.location.href });
    return status === null
      ? Promise.reject(new TypeError("gone"))
      : Promise.resolve(new Response(null, { status }));
  });
  const world: LoginWorld = { location: window.location, history: window.history, document, fetch };
  return { world, asked };
}

beforeEach(() => (document.head.innerHTML = ""));

describe("a code in the address", () => {
  it("is posted once, and is gone from the address bar before that", async () => {
    const { world, asked } = worldAt("/?job=team%2Fdemo&step=3#code=a-b_c%2B");
    await useCode(world);
    expect(asked).toHaveLength(1);
    expect(asked[0]).toMatchObject({ url: "login", method: "POST", body: "token=a-b_c%2B" });
    expect(asked[0]?.shown).toMatch(/\/\?job=team%2Fdemo&step=3$/);
    expect(window.history.state).toEqual({ kept: 1 });
    expect(useLoginTrouble().value).toBeNull();
    await useCode(world);
    expect(asked).toHaveLength(1);
  });

  it("that is used up is told", async () => {
    await useCode(worldAt("/#code=old", 401).world);
    expect(useLoginTrouble().value).toBe("stale");
    await useCode(worldAt("/#code=new", 200).world);
    expect(useLoginTrouble().value).toBeNull();
  });

  it("that a link of another site brought is thrown away", async () => {
    document.head.innerHTML = MARK;
    const { world, asked } = worldAt("/#code=mallory");
    await useCode(world);
    expect(asked).toEqual([]);
    expect(window.location.hash).toBe("");
    expect(useLoginTrouble().value).toBe("elsewhere");
  });

  it.each([403, 408, 413, 429, 500, 502, 503, null])(
    "that a server could not use (%s) is told",
    async (status) => {
      await useCode(worldAt("/#code=x", status).world);
      expect(useLoginTrouble().value).toBe("failed");
      await useCode(worldAt("/#code=x", 200).world);
      expect(useLoginTrouble().value).toBeNull();
    },
  );

  it("is looked for after # only", async () => {
    const { world, asked } = worldAt("/?code=query&token=t#main");
    await useCode(world);
    expect(asked).toEqual([]);
    expect(window.location.hash).toBe("#main");
    expect(codeOf("")).toBeNull();
  });
});
