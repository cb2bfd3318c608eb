import { flushPromises, mount } from "@vue/test-utils";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import type { Line } from "../render/lineChart";
import LineChart from "./LineChart.vue";

const calls: string[] = [];

/** Fake uPlot, which needs a canvas; records calls. */
vi.mock("uplot", () => ({
  default: class {
    batch(change: () => void): void {
      change();
    }
    setData(data: readonly unknown[]): void {
      calls.push(`${String(data.length)} columns`);
    }
    setScale(name: string, { min, max }: { min: number; max: number }): void {
      calls.push(`${name} ${String(min)} to ${String(max)}`);
    }
    redraw(): void {
      calls.push("redraw");
    }
    readonly ctx = { canvas: document.createElement("canvas") };
    destroy(): void {
      calls.length = 0;
    }
  },
}));

const frames: (() => void)[] = [];
const nextFrame = async (): Promise<string[]> => {
  await flushPromises();
  for (const frame of frames.splice(0)) frame();
  return calls.splice(0);
};

beforeEach(() => {
  Object.defineProperty(document, "fonts", { value: { ready: Promise.resolve() }, configurable: true });
  vi.stubGlobal("requestAnimationFrame", (frame: () => void) => frames.push(frame));
  vi.stubGlobal("cancelAnimationFrame", () => frames.splice(0));
});
afterEach(() => vi.unstubAllGlobals());

describe("a chart of lines", () => {
  it("copies its points only when they change", async () => {
    const lines: Line[] = [{ values: [1, 2, 3], colour: "text", width: 1 }];
    const chart = mount(LineChart, {
      props: {
        label: "loss",
        height: 100,
        x: [0, 1, 2],
        lines,
        version: 0,
        view: { from: 0, to: 2 },
        rules: [],
        chartStyle: {
          margins: { left: 0, right: 0, top: 0, bottom: 0 },
          range: (from, to) => ({ from, to }),
          format: String,
        },
      },
    });
    await vi.dynamicImportSettled();
    await nextFrame();
    await chart.setProps({ version: 1 });
    expect(await nextFrame()).toEqual(["2 columns", "x 0 to 2"]);
    await chart.setProps({ view: { from: 1, to: 2 } });
    expect(await nextFrame()).toEqual(["x 1 to 2"]);
    await chart.setProps({ rules: [{ at: 1, colour: "accent", width: 1 }] });
    expect(await nextFrame()).toEqual(["redraw"]);
    await chart.setProps({ view: { from: 0, to: 1 }, rules: [] });
    expect(await nextFrame()).toEqual(["x 0 to 1"]);
    await chart.setProps({ view: { from: 0, to: 2 }, version: 2 });
    expect(await nextFrame()).toEqual(["2 columns", "x 0 to 2"]);
    chart.unmount();
  });
});
