import { flushPromises } from "@vue/test-utils";
import { describe, expect, it, vi } from "vitest";
import { ApiClient } from "../api/client";
import type { JobView, Verdict } from "../api/types";
import { decodeFrame, FrameType, type Header } from "../wire/frames";
import { encodeFrame } from "../wire/testFrames";
import type { LiveEvents } from "../wire/live";
import { historyRange } from "./jobState";
import { createJob } from "./useJob";

const rank = { rank: 0, step: 3, state: "training", pp: 0 };
const job = { name: "demo", ranks: [rank], faults: [], attempt: 0, serverTime: 1 } as unknown as JobView;
const verdict = {
  id: "v",
  subject: { ranks: [2] },
  state: "confirmed",
  stale: false,
  cause: "compute",
  effect: { secondsPerStep: 1 },
};

const ANSWERS: Readonly<Record<string, unknown>> = {
  "/job": job,
  "/verdicts": [verdict],
  "/steps": [{ attempt: 0, step: 3, startNs: 0, durationNs: 5e8, complete: true }],
  "/heatmap": { metric: "compute", attempts: [0], steps: [3], ranks: [0], values: [[0.25]] },
  "/metrics/series": { name: "loss", attempts: [0], steps: [3], values: [7.5] },
};

function setUp(
  answer = (path: string): Response =>
    Response.json(ANSWERS[path] ?? {}, { status: path in ANSWERS ? 200 : 404 }),
) {
  const asked: string[] = [];
  const fetched = vi.fn((input: RequestInfo | URL) => {
    const path = String(input).replace("api/v1", "").split("?")[0] ?? "";
    asked.push(String(input));
    return Promise.resolve(answer(path));
  });
  let events: LiveEvents | undefined;
  const socket = { open: vi.fn(), close: vi.fn() };
  const state = createJob(new ApiClient(fetched), (given) => {
    events = given;
    return socket;
  });
  const send = (type: number, header: Header, body?: Uint8Array): void =>
    events?.onFrame(decodeFrame(encodeFrame(type, header, body)));
  return {
    state,
    socket,
    asked,
    send,
    tell: (live: Parameters<LiveEvents["onState"]>[0]) => events?.onState(live),
    refuse: (reason: string) => events?.onRefused?.(reason),
  };
}

describe("createJob", () => {
  it("loads the history and marks whom a verdict names", async () => {
    const { state, socket, asked } = setUp();
    state.start();
    await flushPromises();
    expect(state.load.value.kind).toBe("ready");
    expect(socket.open).toHaveBeenCalledOnce();
    expect(asked).toContain("api/v1/heatmap?metric=slowdown&from=0");
    expect(state.newestStep.value).toBe(3);
    expect(state.steps.value.value("compute", 0, 3)).toBe(0.25);
    expect(state.series.value.curve("loss").values).toEqual([7.5]);
    expect([...state.suspects.value]).toEqual([2]);
  });

  it("takes live frames, and skips what it does not know", async () => {
    const { state, send } = setUp();
    state.start();
    await flushPromises();
    const header = {
      attempt: 0,
      steps: [4],
      startsNs: [0],
      durationsNs: [1e9],
      ranks: [0],
      metrics: ["compute"],
    };
    send(FrameType.STEPS, header, new Uint8Array(new Float32Array([0.5]).buffer));
    send(FrameType.METRICS, { series: { loss: { attempts: [0], steps: [4], values: [7.25] } } });
    send(FrameType.SNAPSHOT, { ...job, name: "renamed" });
    send(FrameType.VERDICTS, { verdicts: [] satisfies Verdict[] });
    send(FrameType.ERROR, { code: "too-slow", message: "the page did not keep up", hint: "Connect again." });
    send(63, {});
    expect(state.newestStep.value).toBe(4);
    expect(state.steps.value.durationOf(4)).toBe(1);
    expect(state.series.value.curve("loss").steps).toEqual([3, 4]);
    expect(state.job.value?.name).toBe("renamed");
    expect(state.suspects.value.size).toBe(0);
    expect(state.notice.value).toBe("the page did not keep up Connect again.");
  });

  it("asks for the history again after each reconnect, and keeps what it has while it fails", async () => {
    let healthy = true;
    const { state, asked, tell } = setUp((path) =>
      healthy ? Response.json(ANSWERS[path]) : Response.json({}, { status: 503 }),
    );
    state.start();
    await flushPromises();
    const before = asked.length;
    tell({ kind: "lost", since: 1, retryAt: 2 });
    tell({ kind: "live" });
    await flushPromises();
    expect(asked.length).toBe(2 * before);
    healthy = false;
    tell({ kind: "lost", since: 1, retryAt: 2 });
    tell({ kind: "live" });
    await flushPromises();
    expect(state.load.value.kind).toBe("ready");
    expect(state.newestStep.value).toBe(3);
  });

  it("asks for a job only once where the connection opens before its answer, and keeps newer frames", async () => {
    const { state, asked, tell, send } = setUp();
    state.start();
    tell({ kind: "live" });
    send(FrameType.SNAPSHOT, { ...job, name: "newer" });
    send(FrameType.VERDICTS, { verdicts: [] satisfies Verdict[] });
    await flushPromises();
    expect(asked.filter((path) => path === "api/v1/job")).toHaveLength(1);
    expect(state.load.value.kind).toBe("ready");
    expect(state.job.value?.name).toBe("newer");
    expect(state.suspects.value.size).toBe(0);
    expect(state.newestStep.value).toBe(3);
    tell({ kind: "lost", since: 1, retryAt: 2 });
    tell({ kind: "live" });
    await flushPromises();
    expect(asked.filter((path) => path === "api/v1/job")).toHaveLength(2);
    expect(state.job.value?.name).toBe("demo");
  });

  it("asks for a job again where the connection opens before its answer, and that is an error", async () => {
    let answers = 0;
    const { state, tell } = setUp((path) =>
      path === "/job" && answers++ === 0 ? Response.json({}, { status: 503 }) : Response.json(ANSWERS[path]),
    );
    state.start();
    tell({ kind: "live" });
    await flushPromises();
    expect(answers).toBe(2);
    expect(state.load.value.kind).toBe("ready");
  });

  it("asks for steps again where the connection opens after they were requested", async () => {
    const { state, asked, tell } = setUp((path) => {
      if (path === "/steps" && state.live.value.kind !== "live") tell({ kind: "live" });
      return Response.json(ANSWERS[path]);
    });
    state.start();
    await flushPromises();
    expect(asked.filter((path) => path.startsWith("api/v1/steps"))).toHaveLength(2);
    expect(state.load.value.kind).toBe("ready");
  });

  it.each([403, 404])("shows why a socket is refused again and again, and stops (%i)", async (status) => {
    let gone = false;
    const { state, socket, tell } = setUp((path) =>
      gone
        ? Response.json({ code: "no-job", message: "m", hint: "h" }, { status })
        : Response.json(ANSWERS[path]),
    );
    state.start();
    await flushPromises();
    gone = true;
    tell({ kind: "lost", since: 1, retryAt: 2 });
    await flushPromises();
    expect(state.load.value.kind).toBe("ready");
    tell({ kind: "lost", since: 1, retryAt: 3 });
    await flushPromises();
    expect(state.load.value).toMatchObject({ kind: "error", error: { status } });
    expect(socket.close).toHaveBeenCalled();
  });

  it("shows the reason with which its connection was ended", async () => {
    const { state, refuse } = setUp();
    state.start();
    await flushPromises();
    refuse("your rights have changed");
    await flushPromises();
    expect(state.notice.value).toBe("your rights have changed");
    expect(state.load.value.kind).toBe("ready");
  });

  it("shows a refusal even over older content, and stops knocking", async () => {
    let status = 200;
    const { state, socket } = setUp((path) =>
      Response.json(status === 200 ? ANSWERS[path] : { message: "wrong token", hint: "" }, { status }),
    );
    state.start();
    await flushPromises();
    status = 401;
    state.reconnect();
    await flushPromises();
    expect(state.load.value).toMatchObject({ kind: "error", error: { status: 401, message: "wrong token" } });
    expect(socket.close).toHaveBeenCalled();
  });

  it("says what failed where there is nothing to show yet, and recovers when asked", async () => {
    let healthy = false;
    const { state } = setUp((path) =>
      healthy ? Response.json(ANSWERS[path]) : new Response("broken", { status: 500 }),
    );
    state.start();
    await flushPromises();
    expect(state.load.value).toMatchObject({ kind: "error", error: { status: 500 } });
    healthy = true;
    state.reconnect();
    expect(state.load.value.kind).toBe("loading");
    await flushPromises();
    expect(state.load.value.kind).toBe("ready");
  });
});

describe("historyRange", () => {
  it("asks for fewer steps where there are many ranks", () => {
    const many = Array.from({ length: 1000 }, (_, index) => ({ ...rank, rank: index, step: 50_000 }));
    expect(historyRange({ ...job, ranks: many } as unknown as JobView)).toEqual({ from: 49_800 });
    expect(historyRange({ ...job, ranks: many.slice(0, 4) } as unknown as JobView)).toEqual({ from: 46_000 });
  });
});
