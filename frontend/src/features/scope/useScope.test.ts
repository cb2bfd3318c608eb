import { flushPromises } from "@vue/test-utils";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { effectScope, type EffectScope } from "vue";
import { ApiClient } from "../../api/client";
import { ScopeFrame } from "../../scope/protocol";
import { scopeFrame } from "../../scope/testFrames";
import { createScope, type ScopeApi } from "./useScope";

const RUN = "0123456789ab";
const HELLO = {
  job: "tiny",
  role: "viewer",
  source: "live",
  state: "ready",
  model: { layers: 2 },
  runs: [{ run: RUN, state: "done" }],
};

class Socket {
  static readonly all: Socket[] = [];
  readyState = 1;
  onmessage: ((event: { data: ArrayBufferLike }) => void) | null = null;
  onclose: ((event: { code: number; reason: string }) => void) | null = null;
  readonly sent: unknown[] = [];
  constructor() {
    Socket.all.push(this);
  }
  send(text: string): void {
    this.sent.push(JSON.parse(text));
  }
  close(): void {
    this.readyState = 3;
  }
  give(type: number, header: object): void {
    this.onmessage?.({ data: scopeFrame(type, header).buffer });
  }
}

let owner: EffectScope;
let fetched: ReturnType<typeof vi.fn<() => Promise<Response>>>;

beforeEach(() => {
  vi.useFakeTimers();
  vi.stubGlobal("WebSocket", Socket);
  Socket.all.length = 0;
  owner = effectScope();
});
afterEach(() => {
  owner.stop();
  vi.useRealTimers();
  vi.unstubAllGlobals();
});

/** A screen whose hub answers this to the request for the model. */
function started(answer: () => Response): ScopeApi {
  fetched = vi.fn(() => Promise.resolve(answer()));
  const scope = owner.run(() => createScope(new ApiClient(fetched))) as ScopeApi;
  scope.start();
  return scope;
}
/** Lose the connection, and let the page make a new one. */
async function reconnected(boot: string, runs: readonly object[] = HELLO.runs): Promise<Socket> {
  Socket.all.at(-1)?.onclose?.({ code: 1006, reason: "" });
  await vi.advanceTimersByTimeAsync(3000);
  const socket = Socket.all.at(-1) as Socket;
  socket.give(ScopeFrame.HELLO, { ...HELLO, boot, runs });
  await flushPromises();
  return socket;
}

describe("createScope", () => {
  it("requests the model again while none serves, and no more once it is there", async () => {
    let model: object | null = null;
    const scope = started(() => Response.json({ ...HELLO, model }));
    await flushPromises();
    expect([scope.waiting.value, scope.hello.value]).toEqual([true, null]);
    model = HELLO.model;
    await vi.advanceTimersByTimeAsync(2000);
    expect([scope.waiting.value, scope.hello.value?.job]).toEqual([false, "tiny"]);
    const requests = fetched.mock.calls.length;
    await vi.advanceTimersByTimeAsync(10_000);
    expect(fetched.mock.calls.length).toBe(requests);
    scope.stop();
  });

  it("shows an error only while there is nothing to show", async () => {
    const scope = started(() => Response.json({ code: "x", message: "no", hint: "" }, { status: 500 }));
    await flushPromises();
    expect(scope.load.value).toMatchObject({ kind: "error", error: { message: "no" } });
    Socket.all[0]?.give(ScopeFrame.HELLO, HELLO);
    scope.reconnect();
    await flushPromises();
    expect(scope.load.value.kind).toBe("ready");
    scope.stop();
  });

  it("says after a reconnect how long it was alone, and resumes the run that is shown", async () => {
    const scope = started(() => Response.json({ ...HELLO, boot: "a" }));
    Socket.all[0]?.give(ScopeFrame.HELLO, { ...HELLO, boot: "a" });
    await flushPromises();
    expect([scope.runId.value, scope.back.value]).toEqual([RUN, null]);
    const socket = await reconnected("a");
    expect(scope.back.value).toMatchObject({
      seconds: expect.closeTo(3, 0),
      run: RUN,
      known: true,
      restarted: false,
    });
    expect(socket.sent).toContainEqual({ type: "resume", run: RUN, seq: 0 });
    scope.stop();
  });

  it("tells a restarted hub, and a run that it no longer has", async () => {
    const scope = started(() => Response.json({ ...HELLO, boot: "a" }));
    Socket.all[0]?.give(ScopeFrame.HELLO, { ...HELLO, boot: "a" });
    await flushPromises();
    Socket.all[0]?.give(ScopeFrame.RUN, { run: RUN, seq: 1, state: "done" });
    await vi.advanceTimersByTimeAsync(100);
    await reconnected("b", []);
    expect(scope.back.value).toMatchObject({ run: RUN, known: false, restarted: true, frames: 1 });
    expect(scope.runs.value.map(({ run }) => run)).toEqual([RUN]);
    scope.stop();
  });
});
