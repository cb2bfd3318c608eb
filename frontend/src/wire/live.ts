/** The live socket: frames in, reconnects with back-off, and notices a hub that is connected but silent. */
import { decodeFrame, FrameError, FrameType, type Frame } from "./frames";

export const SILENCE_MS = 15_000;
const FIRST_DELAY_MS = 500;
const LONGEST_DELAY_MS = 15_000;
/** A hub that was restarted is back within seconds: for so many attempts the page connects every second. */
const SOON_TRIES = 30;
const SOON_DELAY_MS = 1000;
/** Close code of a connection that is against the rules of the other side (RFC 6455, policy violation). */
const POLICY = 1008;

export type LiveState =
  | { readonly kind: "connecting" }
  | { readonly kind: "live" }
  | { readonly kind: "lost"; readonly since: number; readonly retryAt: number };

/** What the connection needs of the browser; tests pass their own. */
export interface LiveWorld {
  readonly connect: (url: string, protocol?: string) => WebSocket;
  readonly now: () => number;
  readonly random: () => number;
  readonly later: (run: () => void, ms: number) => () => void;
}

export interface LiveEvents {
  readonly onFrame: (frame: Frame) => void;
  readonly onState: (state: LiveState) => void;
  /** Bytes that are no frame: an error of one side, shown to the user. */
  readonly onBadFrame: (error: FrameError) => void;
  /** The hub or the gateway ended the connection with a reason for the user, such as rights that have changed. */
  readonly onRefused?: (reason: string) => void;
}

/** Options of a socket beyond its address. */
export interface LiveOptions {
  readonly protocol?: string;
  /** A hub that sends nothing for so long counts as lost. */
  readonly silenceMs?: number;
}

export const browserWorld: LiveWorld = {
  connect: (url, protocol) => new WebSocket(url, protocol),
  now: () => Date.now(),
  random: () => Math.random(),
  later: (run, ms) => {
    const timer = setTimeout(run, ms);
    return () => clearTimeout(timer);
  },
};

/** Delay before try number `attempt` (from 0): half a second, then one, and later it doubles up to 15 s; spread by a quarter so that pages do not reconnect at the same time. */
export function backoffMs(attempt: number, random: number): number {
  const later = SOON_DELAY_MS * 2 ** Math.max(0, attempt - SOON_TRIES);
  const delay = attempt === 0 ? FIRST_DELAY_MS : Math.min(later, LONGEST_DELAY_MS);
  return delay * (0.75 + random / 2);
}

export class LiveConnection {
  private socket: WebSocket | undefined;
  private cancelTimer: () => void = () => undefined;
  private failures = 0;
  private lostSince: number | undefined;
  private isLive = false;

  constructor(
    private readonly url: string,
    private readonly events: LiveEvents,
    private readonly world: LiveWorld = browserWorld,
    private readonly options: LiveOptions = {},
  ) {}

  /** Connect now, whatever the back-off says. */
  open(): void {
    this.close();
    if (this.lostSince === undefined) this.events.onState({ kind: "connecting" });
    const socket = this.world.connect(this.url, this.options.protocol);
    socket.binaryType = "arraybuffer";
    socket.onmessage = (event: MessageEvent<unknown>) => this.receive(event.data);
    socket.onclose = (event: CloseEvent) => this.closed(event);
    this.socket = socket;
    this.watch();
  }

  /** Stop, without further events. */
  close(): void {
    this.cancelTimer();
    if (!this.socket) return;
    this.socket.onmessage = this.socket.onclose = null;
    this.socket.close();
    this.socket = undefined;
    this.isLive = false;
  }

  /** Text to the hub; dropped while there is no connection. */
  send(text: string): void {
    if (this.socket?.readyState === 1) this.socket.send(text);
  }

  /** A hub sends its first frame at once. An open socket shows less: a gateway opens it before it reaches the hub. */
  private heard(): void {
    if (this.isLive) return;
    this.isLive = true;
    this.failures = 0;
    this.lostSince = undefined;
    this.events.onState({ kind: "live" });
  }

  private watch(): void {
    this.cancelTimer();
    this.cancelTimer = this.world.later(() => this.lost(), this.options.silenceMs ?? SILENCE_MS);
  }

  private receive(data: unknown): void {
    this.watch();
    try {
      if (!(data instanceof ArrayBuffer))
        throw new FrameError("received a text message where frames are binary");
      const frame = decodeFrame(new Uint8Array(data));
      if (frame.type !== FrameType.ERROR) this.heard();
      this.events.onFrame(frame);
    } catch (error) {
      if (!(error instanceof FrameError)) throw error;
      this.heard();
      this.events.onBadFrame(error);
    }
  }

  private closed(event: CloseEvent): void {
    if (event.code === POLICY && event.reason) this.events.onRefused?.(event.reason);
    this.lost();
  }

  private lost(): void {
    this.close();
    const now = this.world.now();
    this.lostSince ??= now;
    const delay = backoffMs(this.failures, this.world.random());
    this.failures += 1;
    this.events.onState({ kind: "lost", since: this.lostSince, retryAt: now + delay });
    this.cancelTimer = this.world.later(() => this.open(), delay);
  }
}

/** Address of a socket (default: the live one) below `root`, relative to the page's address. */
export function liveUrl(base: string, root: string, path = "live"): string {
  const url = new URL(root + path, base);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  url.search = url.hash = "";
  return url.toString();
}
