import { flushPromises, mount } from "@vue/test-utils";
import { afterEach, beforeAll, beforeEach, describe, expect, it, vi } from "vitest";
import { nextTick } from "vue";

const JOB = {
  namespace: "team",
  name: "demo",
  uid: "u",
  phase: "Running",
  iteration: 3,
  totalIterations: 9,
  restarts: 1,
  findings: ["Rank 1 is slow."],
  hungRanks: [],
  createdAt: "2026-01-01T00:00:00Z",
};

let answer: (path: string) => Response;
const asked: string[] = [];

class SilentSocket {
  static readonly opened: string[] = [];
  constructor(url: string) {
    SilentSocket.opened.push(url);
  }
  close(): void {
    return undefined;
  }
}

/** The page in a fresh module world, as a browser loads it. */
async function openPage(url: string, server: "gateway" | "hub") {
  vi.resetModules();
  document.head.innerHTML =
    server === "gateway" ? '<meta name="megatronapp-server" content="gateway" />' : "";
  window.history.replaceState(null, "", url);
  const { default: App } = await import("./App.vue");
  const page = mount(App, { attachTo: document.body });
  await flushPromises();
  return page;
}

/** Compiling the components takes its time; no test waits for it. */
beforeAll(() => import("./App.vue"));

beforeEach(() => {
  asked.length = SilentSocket.opened.length = 0;
  answer = (path) => (path === "api/v1/jobs" ? Response.json([JOB]) : Response.json({}, { status: 404 }));
  vi.stubGlobal("WebSocket", SilentSocket);
  vi.stubGlobal("fetch", (input: RequestInfo | URL) => {
    asked.push(String(input));
    return Promise.resolve(answer(String(input)));
  });
});
afterEach(() => {
  document.body.innerHTML = "";
  vi.unstubAllGlobals();
});

describe("a page that a gateway serves", () => {
  it("begins with the jobs, and opens one below its own prefix", async () => {
    const page = await openPage("/", "gateway");
    expect(asked).toEqual(["api/v1/jobs"]);
    expect(page.get(".panel tbody tr").text()).toContain("team");
    expect(page.get(".panel tbody tr").text()).toContain("3 / 9");
    expect(page.get(".panel tbody tr").text()).toContain("Rank 1 is slow.");
    expect(page.get(".panel tbody a").attributes("href")).toBe("?job=team%2Fdemo");
    await page.get(".panel tbody a").trigger("click");
    await flushPromises();
    expect(window.location.search).toBe("?job=team%2Fdemo");
    expect(asked).toContain("api/v1/jobs/team/demo/job");
    expect(SilentSocket.opened[0]).toMatch(/\/api\/v1\/jobs\/team\/demo\/live$/);
    expect(page.get("nav").text()).toContain("team/demo");
    await page.get(".home").trigger("click");
    await nextTick();
    expect(window.location.search).toBe("");
    expect(page.find("h1").text()).toBe("Jobs");
    page.unmount();
  });

  it("opens a shared address at once, with what was selected in it", async () => {
    const page = await openPage("/?job=team%2Fdemo&step=84", "gateway");
    expect(asked).not.toContain("api/v1/jobs");
    expect(asked).toContain("api/v1/jobs/team/demo/verdicts");
    expect(window.location.search).toBe("?job=team%2Fdemo&step=84");
    page.unmount();
  });

  it("asks for a token by a form that no script reads, and knocks no more", async () => {
    vi.useFakeTimers();
    answer = () => Response.json({ code: "log-in", message: "who are you", hint: "" }, { status: 401 });
    const page = await openPage("/", "gateway");
    await vi.dynamicImportSettled();
    const form = page.get("form");
    expect(form.attributes()).toMatchObject({ method: "post", action: "login" });
    expect(form.get("input").attributes()).toMatchObject({ type: "password", name: "token" });
    expect(page.get("pre").text()).toBe("megatronapp ui --cluster");
    vi.advanceTimersByTime(60_000);
    await flushPromises();
    expect(asked).toHaveLength(1);
    page.unmount();
    vi.useRealTimers();
  });

  it("tells how to open the job that the address names", async () => {
    answer = () => Response.json({ code: "log-in", message: "who are you", hint: "" }, { status: 401 });
    const page = await openPage("/?job=team%2Fdemo", "gateway");
    await vi.dynamicImportSettled();
    expect(page.get("pre").text()).toBe("megatronapp ui demo -n team");
    page.unmount();
  });

  it("says what failed, keeps the list that it has, and asks again by itself", async () => {
    vi.useFakeTimers();
    const page = await openPage("/", "gateway");
    answer = () => Response.json({ code: "x", message: "no cluster", hint: "Wait." }, { status: 503 });
    vi.advanceTimersByTime(5000);
    await flushPromises();
    expect(page.get('[data-state="error"]').text()).toContain("no cluster");
    expect(page.findAll(".panel tbody tr")).toHaveLength(1);
    answer = () => Response.json([]);
    vi.advanceTimersByTime(5000);
    await flushPromises();
    expect(page.find('[data-state="error"]').exists()).toBe(false);
    expect(page.get('[data-state="empty"]').text()).toContain("No job that you may see");
    page.unmount();
    vi.useRealTimers();
  });
});

describe("a page that a hub serves", () => {
  it("opens its one job, whatever the address says of others", async () => {
    const page = await openPage("/?job=team%2Fdemo", "hub");
    expect(asked).toContain("api/v1/job");
    expect(asked.some((path) => path.includes("jobs/team"))).toBe(false);
    expect(SilentSocket.opened[0]).toMatch(/\/api\/v1\/live$/);
    page.unmount();
  });

  it("lists its job in the same table as a gateway", async () => {
    answer = (path) =>
      path === "api/v1/jobs"
        ? Response.json([
            { uid: "u", namespace: "team", name: "demo", phase: "Running", here: true, findings: [] },
          ])
        : Response.json({}, { status: 404 });
    const page = await openPage("/?page=jobs", "hub");
    const headings = page.findAll(".panel th").map((cell) => cell.text());
    expect(headings).toEqual(["Namespace", "Job", "Phase", "Iteration", "Slow"]);
    await page.get(".panel tbody a").trigger("click");
    await nextTick();
    expect(window.location.search).toBe("");
    page.unmount();
  });
});
