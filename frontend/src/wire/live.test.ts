import { describe, expect, it, vi } from "vitest";
import { FrameType } from "./frames";
import { backoffMs, LiveConnection, liveUrl, SILENCE_MS, type LiveState } from "./live";
import { encodeFrame } from "./testFrames";

class FakeSocket {
  binaryType = "";
  closed = false;
  onmessage: ((event: { data: unknown }) => void) | null = null;
  onclose: ((event: { code: number; reason: string }) => void) | null = null;
  close(): void {
    this.closed = true;
  }
}

function setUp() {
  const sockets: FakeSocket[] = [];
  const timers: { run: () => void; ms: number; cancelled: boolean }[] = [];
  const states: LiveState[] = [];
  const onFrame = vi.fn();
  const onBadFrame = vi.fn();
  const onRefused = vi.fn();
  let now = 1000;
  const connection = new LiveConnection(
    "ws://hub/api/v1/live",
    { onFrame, onBadFrame, onRefused, onState: (state) => states.push(state) },
    {
      connect: () => {
        const socket = new FakeSocket();
        sockets.push(socket);
        return socket as unknown as WebSocket;
      },
      now: () => now,
      random: () => 0.5,
      later: (run, ms) => {
        const timer = { run, ms, cancelled: false };
        timers.push(timer);
        return () => (timer.cancelled = true);
      },
    },
  );
  const fire = (): number => {
    const timer = timers.filter((candidate) => !candidate.cancelled).at(-1);
    if (!timer) throw new Error("no timer is set");
    timer.cancelled = true;
    timer.run();
    return timer.ms;
  };
  const newest = (): FakeSocket => sockets.at(-1) ?? new FakeSocket();
  return {
    connection,
    sockets,
    newest,
    states,
    onFrame,
    onBadFrame,
    onRefused,
    fire,
    tick: (ms: number) => (now += ms),
  };
}

const GONE = { code: 1006, reason: "" };
const snapshot = encodeFrame(FrameType.SNAPSHOT, { name: "demo" }).buffer;

describe("LiveConnection", () => {
  it("hands frames on", () => {
    const { connection, newest, onFrame, states } = setUp();
    connection.open();
    newest().onmessage?.({ data: snapshot });
    expect(states.map((state) => state.kind)).toEqual(["connecting", "live"]);
    expect(onFrame).toHaveBeenCalledWith(
      expect.objectContaining({ type: FrameType.SNAPSHOT, header: { name: "demo" } }),
    );
  });

  it("tells of bytes that are no frame and stays connected", () => {
    const { connection, newest, onBadFrame, states } = setUp();
    connection.open();
    newest().onmessage?.({ data: new ArrayBuffer(3) });
    newest().onmessage?.({ data: "text" });
    expect(onBadFrame).toHaveBeenCalledTimes(2);
    expect(states.at(-1)?.kind).toBe("live");
  });

  it("reconnects with growing delays and remembers since when it is lost", () => {
    const { connection, newest, states, fire, tick, sockets } = setUp();
    connection.open();
    newest().onmessage?.({ data: snapshot });
    const delays: number[] = [];
    for (let round = 0; round < 3; round += 1) {
      newest().onclose?.(GONE);
      delays.push(fire());
      tick(100);
    }
    expect(delays).toEqual([500, 1000, 1000]);
    expect(states.filter((state) => state.kind === "lost").map((state) => state.since)).toEqual([
      1000, 1000, 1000,
    ]);
    expect(sockets).toHaveLength(4);
  });

  it("counts from the start again once it was connected", () => {
    const { connection, newest, fire, states } = setUp();
    connection.open();
    newest().onclose?.(GONE);
    fire();
    newest().onmessage?.({ data: snapshot });
    newest().onclose?.(GONE);
    expect(fire()).toBe(500);
    expect(states.map((state) => state.kind)).toEqual(["connecting", "lost", "live", "lost"]);
  });

  it("takes a connected but silent hub for lost", () => {
    const { connection, newest, fire, states } = setUp();
    connection.open();
    newest().onmessage?.({ data: snapshot });
    const silent = newest();
    expect(fire()).toBe(SILENCE_MS);
    expect(silent.closed).toBe(true);
    expect(states.at(-1)?.kind).toBe("lost");
  });

  it("is not live while a gateway only sends why it does not reach the hub", () => {
    const { connection, newest, onFrame, states, fire } = setUp();
    const error = encodeFrame(FrameType.ERROR, { code: "hub-not-there", message: "m", hint: "h" }).buffer;
    connection.open();
    const delays = [1, 2, 3].map(() => {
      newest().onmessage?.({ data: error });
      newest().onclose?.({ code: 1012, reason: "hub-not-there" });
      return fire();
    });
    expect(delays).toEqual([500, 1000, 1000]);
    expect(onFrame).toHaveBeenCalledTimes(3);
    expect(new Set(states.map((state) => state.kind))).toEqual(new Set(["connecting", "lost"]));
  });

  it("passes on why it was refused", () => {
    const { connection, newest, onRefused } = setUp();
    connection.open();
    newest().onclose?.({ code: 1008, reason: "your rights have changed" });
    expect(onRefused).toHaveBeenCalledExactlyOnceWith("your rights have changed");
  });

  it("says nothing after it was closed", () => {
    const { connection, newest, states } = setUp();
    connection.open();
    const socket = newest();
    connection.close();
    socket.onclose?.(GONE);
    expect(states.map((state) => state.kind)).toEqual(["connecting"]);
  });
});

describe("backoffMs", () => {
  it("has an upper end and spreads by a quarter to both sides", () => {
    expect(backoffMs(40, 0)).toBe(11_250);
    expect(backoffMs(40, 1)).toBe(18_750);
  });
  it("is about a second for half a minute, in which a hub that was restarted comes back", () => {
    const delays = Array.from({ length: 30 }, (_, attempt) => backoffMs(attempt, 0.5));
    expect(delays[0]).toBe(500);
    expect(Math.max(...delays)).toBe(1000);
    expect(delays.reduce((sum, delay) => sum + delay)).toBeGreaterThan(29_000);
    expect(backoffMs(33, 0.5)).toBe(8000);
  });
});

describe("liveUrl", () => {
  it("stays beside the page", () => {
    expect(liveUrl("http://127.0.0.1:8080/?step=3#x", "api/v1/")).toBe("ws://127.0.0.1:8080/api/v1/live");
    expect(liveUrl("https://gateway/a/", "api/v1/jobs/team/demo/")).toBe(
      "wss://gateway/a/api/v1/jobs/team/demo/live",
    );
  });
});
