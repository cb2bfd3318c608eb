import { flushPromises, mount } from "@vue/test-utils";
import { afterEach, describe, expect, it } from "vitest";
import { defineComponent, ref, shallowRef } from "vue";
import { ApiClient } from "../../../api/client";
import type { Timeline } from "../../../api/types";
import { Kind } from "../../../trace/kinds";
import { timelineOf } from "../../../trace/testTimeline";
import { buildTimeline, indexOf, mergedInto, placeOf, type TimelineModel } from "../../../trace/timeline";
import type { View } from "./spanWindows";
import { useSpanWindow, type SpanWindow } from "./useSpanWindow";

/** The hub's answer to a request, of a step with a span for every rank and millisecond. */
function answerTo(query: URLSearchParams): Timeline {
  const number = (name: string): number => Number(query.get(name) ?? 0);
  const [firstTrack, tracks, fromNs] = [number("firstTrack"), number("tracks"), number("fromNs")];
  const source = timelineOf(
    Array.from({ length: tracks }, (_, at) => [firstTrack + at, Kind.FORWARD, 0, fromNs, 10]),
  );
  const window = {
    spans: 1e6,
    stepFromNs: 0,
    stepToNs: 1e9,
    rankRuns: [[0, 10_000]] as [number, number][],
    ...{ fromNs, toNs: number("toNs") || 1e9, firstTrack, tracks, pixels: number("pixels") },
    place: source.rank.map((rank) => 100 * rank),
    merged: source.rank.map(() => 7),
  };
  return { ...source, window };
}
const base = (): TimelineModel => buildTimeline(answerTo(new URLSearchParams("tracks=140&pixels=1200")));
const VIEW: View = { fromNs: 0, toNs: 1e9, firstLane: 0, lanes: 94, pixels: 1200 };

interface Request {
  readonly query: URLSearchParams;
  readonly signal: AbortSignal;
  readonly answer: (response?: Response) => Promise<unknown>;
}

function panel() {
  const requests: Request[] = [];
  const client = new ApiClient((input, init) => {
    const query = new URLSearchParams(String(input).split("?")[1]);
    return new Promise((resolve, reject) => {
      const signal = init?.signal as AbortSignal;
      signal.addEventListener("abort", () => reject(new DOMException("", "AbortError")));
      const answer = (response = Response.json(answerTo(query))): Promise<unknown> => {
        resolve(response);
        return flushPromises();
      };
      requests.push({ query, signal, answer });
    });
  });
  const [first, span] = [shallowRef<TimelineModel | null>(base()), ref<number | null>(null)];
  let parts!: SpanWindow;
  const page = mount(
    defineComponent(() => {
      parts = useSpanWindow(client, {
        base: () => first.value,
        span: () => span.value,
        build: buildTimeline,
      });
      return () => null;
    }),
  );
  return { requests, first, span, parts, page };
}
let opened: ReturnType<typeof panel> | undefined;
const open = (): ReturnType<typeof panel> => (opened = panel());
afterEach(() => opened?.page.unmount());

describe("the part of a large step", () => {
  it("is requested only when what is loaded does not cover the view", async () => {
    const { requests, parts, first } = open();
    parts.look(VIEW);
    expect(requests).toHaveLength(0);
    parts.look({ ...VIEW, firstLane: 500 });
    expect(requests).toHaveLength(1);
    expect(requests[0]?.query.get("firstTrack")).toBe("453");
    expect(parts.model.value).toBe(first.value);
    await requests[0]?.answer();
    expect(parts.model.value?.window?.firstTrack).toBe(453);
    expect(parts.model.value?.lanes).toHaveLength(10_000);
    parts.look({ ...VIEW, firstLane: 510 });
    expect(requests).toHaveLength(1);
  });

  it("is the latest one: an older request is cancelled", async () => {
    const { requests, parts } = open();
    parts.look({ ...VIEW, firstLane: 500 });
    parts.look({ ...VIEW, firstLane: 510 });
    expect(requests).toHaveLength(1);
    parts.look({ ...VIEW, firstLane: 900 });
    expect(requests[0]?.signal.aborted).toBe(true);
    await requests[1]?.answer();
    expect(parts.model.value?.window?.firstTrack).toBe(853);
    expect(parts.problem.value).toBeNull();
  });

  it("stays when a request fails, and is requested again by the user", async () => {
    const { requests, parts, first } = open();
    parts.look({ ...VIEW, firstLane: 500 });
    const body = { code: "step-not-held", message: "step 7 is not held in full", hint: "" };
    await requests[0]?.answer(Response.json(body, { status: 404 }));
    expect(parts.problem.value?.message).toContain("step 7");
    expect(parts.model.value).toBe(first.value);
    parts.retry();
    await requests[1]?.answer();
    expect(parts.problem.value).toBeNull();
    expect(parts.model.value).not.toBe(first.value);
  });

  it("has the selected span wherever it is", async () => {
    const { requests, parts, span, page } = open();
    parts.look(VIEW);
    span.value = 700;
    await page.vm.$nextTick();
    expect(requests[0]?.query.get("span")).toBe("700");
  });

  it("ends with its step", async () => {
    const { requests, parts, first, page } = open();
    parts.look({ ...VIEW, firstLane: 500 });
    first.value = base();
    await page.vm.$nextTick();
    expect(requests[0]?.signal.aborted).toBe(true);
    expect(requests).toHaveLength(2);
    await requests[0]?.answer();
    expect(parts.model.value).toBe(first.value);
  });
});

describe("places of spans", () => {
  it("lead from a part to the whole step and back", () => {
    const model = base();
    expect(placeOf(model, 3)).toBe(300);
    expect(indexOf(model, 300)).toBe(3);
    expect(indexOf(model, 301)).toBeNull();
    expect(mergedInto(model, 3)).toBe(7);
    const whole = buildTimeline(timelineOf([[0, Kind.FORWARD, 0, 0, 1]]));
    expect([placeOf(whole, 0), indexOf(whole, 0), indexOf(whole, 1), mergedInto(whole, 0)]).toEqual([
      0,
      0,
      null,
      1,
    ]);
  });
});
