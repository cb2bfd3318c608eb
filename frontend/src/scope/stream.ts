/** The socket of a scope screen: frames into the store, credit back after painting, and what was missed after a reconnect. */
import { LiveConnection, type LiveState, type LiveWorld, browserWorld } from "../wire/live";
import { FrameType, type Frame } from "../wire/frames";
import type { FrameStore } from "./store/frameStore";
import { ScopeFrame, SUBPROTOCOL, type EarlyHello, type ScopeStatus } from "./protocol";

/** A hub without news may be silent for long; a closed socket is noticed at once. */
const SILENCE_MS = 24 * 3600 * 1000;

export interface StreamEvents {
  /** `restarted`: since the last HELLO; null for a hub that does not report it. */
  readonly onHello: (hello: EarlyHello, restarted: boolean | null) => void;
  readonly onStatus: (status: ScopeStatus) => void;
  /** The store has changed: paint, and call `painted` then. */
  readonly onChange: () => void;
  readonly onState: (state: LiveState) => void;
  readonly onProblem: (message: string) => void;
}

export class ScopeStream {
  private readonly connection: LiveConnection;
  private owed = 0;
  private followed: readonly string[] = [];
  /** Whether this connection has received HELLO. */
  private greeted = false;
  /** Of the last HELLO; undefined: there was none, or the hub does not report it. */
  private boot: string | undefined;

  constructor(
    url: string,
    private readonly store: FrameStore,
    private readonly events: StreamEvents,
    world: LiveWorld = browserWorld,
  ) {
    this.connection = new LiveConnection(
      url,
      {
        onFrame: (frame) => this.take(frame),
        onBadFrame: (error) => events.onProblem(`The hub sent what this page cannot read: ${error.message}`),
        onState: (state) => {
          if (state.kind !== "live") this.greeted = false;
          events.onState(state);
        },
      },
      world,
      { protocol: SUBPROTOCOL, silenceMs: SILENCE_MS },
    );
  }

  open(): void {
    this.owed = 0;
    this.greeted = false;
    this.connection.open();
  }

  close(): void {
    this.connection.close();
  }

  /** Everything received so far is painted: the hub may send as much again. */
  painted(): void {
    if (this.owed === 0) return;
    this.say({ type: "credit", bytes: this.owed });
    this.owed = 0;
  }

  /** Request the frames of these runs that the page has not received; the hub sends them from its ring, or a gap. */
  follow(...runs: readonly string[]): void {
    const fresh = runs.filter((run) => !this.followed.includes(run));
    this.followed = runs;
    if (this.greeted) fresh.forEach((run) => this.resume(run));
  }

  private resume(run: string): void {
    this.say({ type: "resume", run, seq: this.store.resumeAt(run) });
  }

  private say(message: Record<string, unknown>): void {
    this.connection.send(JSON.stringify(message));
  }

  /** Notes which start of the hub this is; after a restart the numbers of frames that are known are void. */
  private meet(boot: string | undefined): boolean | null {
    const restarted = boot === undefined || this.boot === undefined ? null : boot !== this.boot;
    this.boot = boot;
    if (restarted) this.store.hubBegan();
    return restarted;
  }

  private take(frame: Frame): void {
    this.owed += frame.body.buffer.byteLength;
    if (frame.type === ScopeFrame.HELLO) {
      const hello = frame.header as unknown as EarlyHello;
      this.events.onHello(hello, this.meet(hello.boot ?? undefined));
      this.greeted = true;
      this.followed.forEach((run) => this.resume(run));
    } else if (frame.type === ScopeFrame.STATE) {
      this.events.onStatus(frame.header as unknown as ScopeStatus);
    } else if (frame.type === FrameType.ERROR) {
      this.events.onProblem(`${String(frame.header["message"])} ${String(frame.header["hint"] ?? "")}`);
    } else if (!this.store.take(frame)) {
      return;
    }
    this.events.onChange();
  }
}
