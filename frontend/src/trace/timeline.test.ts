import { describe, expect, it } from "vitest";
import { Kind, PassFlag, spanStyle } from "./kinds";
import { orderNote } from "./describe";
import { buildTimeline, neighbour, otherEnd, pick, spanAt, trackOf } from "./timeline";
import { rows, timelineOf } from "./testTimeline";

const model = buildTimeline(timelineOf(rows, [[2, 5]]));

describe("timeline", () => {
  it("has a lane per rank and covers its spans, samples left out", () => {
    expect(model.lanes.map((lane) => lane.rank)).toEqual([0, 1]);
    expect([model.fromNs, model.toNs]).toEqual([0, 101]);
    expect(model.lanes[0]?.main).toEqual([1, 2, 3]);
    expect(model.lanes[0]?.all[0]).toBe(0);
    expect(trackOf(Kind.FAULT)).toBe("fault");
  });

  it("keeps copies out of the passes that they run beside", () => {
    const copied = buildTimeline(
      timelineOf([...rows, [1, Kind.COPY, 0, 36, 20], [1, Kind.WEIGHT, 0, 96, 4]]),
    );
    expect(trackOf(Kind.COPY)).toBe("copy");
    expect(copied.lanes[1]?.main).toEqual([5, 6, 9]);
    expect(copied.lanes[1]?.all).toContain(8);
  });

  it("knows the passes that ran before their turn, and no step that has the same bit", () => {
    const kinds = [Kind.STEP, Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT];
    const source = timelineOf(kinds.map((kind) => [0, kind, 0, 0, 1]));
    const early = { ...source, flags: [PassFlag.EARLY, PassFlag.EARLY, 0, PassFlag.EARLY] };
    const spans = kinds.flatMap((_, index) => spanAt(early, index) ?? []);
    expect(spans.map((span) => orderNote(span) !== "")).toEqual([false, true, false, true]);
  });

  it("has forward ranks above backward ranks, and tells messages between them apart", () => {
    const source = {
      ...timelineOf([
        [0, Kind.BACKWARD, 0, 10, 20],
        [0, Kind.COPY, 0, 5, 2],
        [0, Kind.RECV_WAIT, 0, 5, 2],
        [0, Kind.SEND_POST, 0, 30, 1],
        [1, Kind.FORWARD, 0, 0, 5],
        [1, Kind.SEND_POST, 0, 4, 1],
        [1, Kind.RECV_WAIT, 0, 20, 9],
        [2, Kind.COPY, 0, 5, 2],
      ]),
      roles: ["backward", "forward", "forward"] as ("backward" | "forward")[],
      peer: [null, 1, 1, 1, null, 0, 0, 1],
    };
    const { lanes } = buildTimeline(source);
    expect(lanes.map(({ rank, role }) => [rank, role])).toEqual([
      [1, "forward"],
      [2, "forward"],
      [0, "backward"],
    ]);
    const spans = source.kind.map((_, index) => spanAt(source, index));
    expect(spans.map((span) => span?.crossing)).toEqual([
      ...[null, "shipment", "shipment", "credit"],
      ...[null, "shipment", "credit", null],
    ]);
    const styles = spans.map((span) => span && spanStyle(span));
    expect(styles.map((style) => style?.label)).toEqual([
      ...["Backward", "Copy of a shipment", "Wait for a shipment", "Post a credit"],
      ...["Forward", "Post a shipment", "Wait for a credit", "Copy of a message"],
    ]);
    expect(styles.map((style) => style?.group)).toEqual([
      ...["backward", "shipment", "wait", "transfer", "forward", "shipment", "wait", "transfer"],
    ]);
  });

  it("survives a step without spans", () => {
    const empty = buildTimeline(timelineOf([]));
    expect(empty.lanes).toEqual([]);
    expect(pick(empty, 0, 5, 1)).toBeUndefined();
  });

  it("finds the span under the pointer, or one close by", () => {
    expect(pick(model, 0, 15, 0)).toBe(1);
    expect(pick(model, 0, 33, 3)).toBe(2);
    expect(pick(model, 0, 45, 3)).toBeUndefined();
    expect(pick(model, 5, 15, 3)).toBeUndefined();
  });

  it("moves by keys along and across lanes", () => {
    expect(neighbour(model, null, 1, "next")).toBe(5);
    expect(neighbour(model, 1, 0, "next")).toBe(2);
    expect(neighbour(model, 1, 0, "previous")).toBe(1);
    expect(neighbour(model, 3, 0, "down")).toBe(6);
    expect(neighbour(model, 6, 1, "up")).toBe(3);
    expect(neighbour(model, 6, 1, "down")).toBe(6);
    expect(neighbour(model, 3, 0, "first")).toBe(1);
    expect(neighbour(model, 5, 1, "last")).toBe(6);
  });

  it("knows the other end of a transfer", () => {
    expect(otherEnd(model, 2)).toBe(5);
    expect(otherEnd(model, 5)).toBe(2);
    expect(otherEnd(model, 1)).toBeUndefined();
  });
});
