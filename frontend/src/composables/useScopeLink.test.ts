import { flushPromises } from "@vue/test-utils";
import { describe, expect, it, vi } from "vitest";
import { ApiClient } from "../api/client";
import { useScopeLink } from "./useScopeLink";

const MODEL = { layers: 2 };
const linkFor = (answer: () => Promise<Response>) => {
  const fetched = vi.fn(answer);
  return { fetched, link: useScopeLink(new ApiClient(fetched)) };
};

describe("useScopeLink", () => {
  it.each([
    [{ source: "live", model: MODEL, role: "controller" }, "live", "controller"],
    [{ source: "replay", model: MODEL, role: "viewer" }, "replay", "viewer"],
    [{ source: "live", model: null, role: "viewer" }, null, "viewer"],
    [{ model: MODEL }, null, undefined],
  ])("reads %j as %s of a %s, from one request", async (body, source, role) => {
    const { fetched, link } = linkFor(() => Promise.resolve(Response.json(body)));
    expect(link.value).toEqual({ source: null });
    await flushPromises();
    expect(link.value).toEqual({ source, role });
    expect(fetched.mock.calls.map(([url]: unknown[]) => String(url))).toEqual(["api/v1/scope"]);
  });

  it.each([
    ["is refused", () => Promise.resolve(Response.json({ code: "not-found" }, { status: 404 }))],
    ["fails", () => Promise.reject(new TypeError("no network"))],
    ["is no JSON", () => Promise.resolve(new Response("<html>"))],
  ])("has no model and no role where the request %s", async (_, answer) => {
    const { link } = linkFor(answer);
    await flushPromises();
    expect(link.value).toEqual({ source: null });
  });
});
