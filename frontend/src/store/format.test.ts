import * as format from "./format";
import { describe, expect, it } from "vitest";

describe("format", () => {
  it.each([
    [format.seconds(1.234), "1.23 s"],
    [format.seconds(0.0843), "84.3 ms"],
    [format.seconds(2.5e-6), "2.50 µs"],
    [format.seconds(250), "250 s"],
    [format.seconds(0), "0 s"],
    [format.duration(59.6), "1 min 0 s"],
    [format.duration(4000), "1 h 6 min"],
    [format.duration(200_000), "2 d 7 h"],
    [format.integer(12345.6), "12,346"],
    [format.compact(12345), "12.3k"],
    [format.compact(2_500_000), "2.50M"],
    [format.compact(7.25), "7.25"],
    [format.loss(2.17349), "2.1735"],
    [format.ratio(2.958), "2.96×"],
    [format.ratio(12.34), "12.3×"],
    [format.percent(0.314), "31 %"],
    [format.bytes(1536), "1.50 KiB"],
    [format.bytes(12), "12 B"],
    [format.secondsTick(0.02, 0.01), "20 ms"],
    [format.secondsTick(3, 1), "3 s"],
    [format.secondsTick(1, 0.5), "1.0 s"],
    [format.secondsTick(2e-6, 1e-6), "2 µs"],
    [format.rankList([2]), "rank 2"],
    [format.rankList([1, 2, 5]), "ranks 1, 2 and 5"],
  ])("%s", (found, expected) => {
    expect(found).toBe(expected);
  });

  it("shows a dash for what is absent or no number", () => {
    const functions = [
      format.seconds,
      format.duration,
      format.integer,
      format.compact,
      format.loss,
      format.ratio,
      format.percent,
      format.bytes,
      format.clock,
    ];
    for (const show of functions)
      for (const value of [null, undefined, Number.NaN]) expect(show(value)).toBe("–");
  });
});
