import { flushPromises } from "@vue/test-utils";
import { describe, expect, it, vi } from "vitest";
import { ApiClient } from "../api/client";
import { useScopeLink } from "./useScopeLink";

const MODEL = { layers: 2 };
const linkFor = (answer: () => Promise<Response>) => {
  const fetched = vi.fn(answer);
  return { fetched, source: useScopeLink(new ApiClient(fetched)) };
};

describe("useScopeLink", () => {
  it.each([
    [{ source: "live", model: MODEL }, "live"],
    [{ source: "replay", model: MODEL }, "replay"],
    [{ source: "live", model: null }, null],
    [{ model: MODEL }, null],
  ])("reads %j as %s, from one request", async (body, expected) => {
    const { fetched, source } = linkFor(() => Promise.resolve(Response.json(body)));
    expect(source.value).toBeNull();
    await flushPromises();
    expect(source.value).toBe(expected);
    expect(fetched.mock.calls.map(([url]: unknown[]) => String(url))).toEqual(["api/v1/scope"]);
  });

  it.each([
    ["is refused", () => Promise.resolve(Response.json({ code: "not-found" }, { status: 404 }))],
    ["fails", () => Promise.reject(new TypeError("no network"))],
    ["is no JSON", () => Promise.resolve(new Response("<html>"))],
  ])("has no model where the request %s", async (_, answer) => {
    const { source } = linkFor(answer);
    await flushPromises();
    expect(source.value).toBeNull();
  });
});
