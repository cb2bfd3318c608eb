import { describe, expect, it, vi } from "vitest";
import { FrameStore } from "./store/frameStore";
import { ScopeFrame } from "./protocol";
import { ScopeStream } from "./stream";
import { scopeFrame } from "./testFrames";

class Socket {
  readyState = 1;
  binaryType = "";
  onmessage: ((event: { data: ArrayBufferLike }) => void) | null = null;
  onclose: ((event: { code: number; reason: string }) => void) | null = null;
  readonly sent: Record<string, unknown>[] = [];
  send(text: string): void {
    this.sent.push(JSON.parse(text) as Record<string, unknown>);
  }
  close(): void {
    this.readyState = 3;
  }
}

describe("ScopeStream", () => {
  function started() {
    const sockets: Socket[] = [];
    const timers: (() => void)[] = [];
    const world = {
      connect: (_: string, protocol?: string) => {
        expect(protocol).toBe("megatronapp.scope.1");
        sockets.push(new Socket());
        return sockets.at(-1) as unknown as WebSocket;
      },
      now: () => 0,
      random: () => 0.5,
      later: (run: () => void, ms: number) => (ms < 60_000 && timers.push(run), () => undefined),
    };
    const store = new FrameStore();
    const events = {
      onHello: vi.fn(),
      onStatus: vi.fn(),
      onChange: vi.fn(),
      onState: vi.fn(),
      onProblem: vi.fn(),
    };
    const stream = new ScopeStream("ws://hub", store, events, world);
    stream.open();
    const give = (bytes: Uint8Array): void => sockets.at(-1)?.onmessage?.({ data: bytes.buffer });
    return { stream, sockets, timers, events, give, store };
  }
  const hello = scopeFrame(ScopeFrame.HELLO, { job: "tiny" });
  const run = (seq: number): Uint8Array => scopeFrame(ScopeFrame.RUN, { seq, run: "ab", state: "decoding" });

  it("gives credit back for what was painted, once", () => {
    const { stream, sockets, give, events } = started();
    give(hello);
    give(run(1));
    expect(sockets[0]?.sent).toEqual([]);
    stream.painted();
    stream.painted();
    expect(sockets[0]?.sent).toEqual([{ type: "credit", bytes: hello.length + run(1).length }]);
    expect(events.onHello).toHaveBeenCalledWith(expect.objectContaining({ job: "tiny" }), null);
    expect(events.onChange).toHaveBeenCalledTimes(2);
  });

  it("asks after a reconnect for what it missed", () => {
    const { stream, sockets, timers, give } = started();
    give(hello);
    stream.follow("ab");
    give(run(1));
    give(run(7));
    sockets[0]?.onclose?.({ code: 1006, reason: "" });
    timers.at(-1)?.();
    give(hello);
    expect(sockets[0]?.sent).toEqual([{ type: "resume", run: "ab", seq: 0 }]);
    expect(sockets[1]?.sent).toEqual([{ type: "resume", run: "ab", seq: 7 }]);
  });

  it("asks a hub that began anew for all that it has, whatever its numbers", () => {
    const { stream, sockets, timers, give, events, store } = started();
    const of = (boot: string): Uint8Array => scopeFrame(ScopeFrame.HELLO, { job: "tiny", boot });
    const again = (boot: string): void => {
      sockets.at(-1)?.onclose?.({ code: 1006, reason: "" });
      timers.at(-1)?.();
      give(of(boot));
    };
    give(of("a"));
    stream.follow("ab");
    give(run(1));
    give(run(7));
    again("a");
    expect(sockets.at(-1)?.sent).toEqual([{ type: "resume", run: "ab", seq: 7 }]);
    again("b");
    expect(sockets.at(-1)?.sent).toEqual([{ type: "resume", run: "ab", seq: 0 }]);
    give(run(1));
    give(run(3));
    again("b");
    expect(sockets.at(-1)?.sent).toEqual([{ type: "resume", run: "ab", seq: 3 }]);
    expect(events.onHello.mock.calls.map(([, restarted]) => restarted as unknown)).toEqual([
      null,
      false,
      true,
      false,
    ]);
    expect(store.runs.has("ab")).toBe(true);
  });

  it("asks for all of a run of which it heard the end only", () => {
    const { stream, sockets, give } = started();
    give(hello);
    give(run(40));
    stream.follow("ab");
    expect(sockets[0]?.sent).toEqual([{ type: "resume", run: "ab", seq: 0 }]);
  });

  it("says what it cannot read and goes on", () => {
    const { give, events, store } = started();
    give(scopeFrame(ScopeFrame.RUN, { seq: 1 }));
    give(new Uint8Array(8));
    expect(events.onProblem).toHaveBeenCalledTimes(2);
    give(run(1));
    expect(store.runs.has("ab")).toBe(true);
  });
});
