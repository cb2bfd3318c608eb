import { describe, expect, it } from "vitest";
import { pluginSites, pluginStrips } from "./pluginSites";
import { SampleStore } from "../store/sampleStore";
import type { Tensor } from "../tensors/tensors";

const tensor = (name: string, shape: readonly number[], data: number[]): Tensor => ({
  ...{ name, code: "f32", shape, scales: null },
  data: Float32Array.from(data),
});

describe("sites of plugins", () => {
  it("are those that no model has by itself", () => {
    expect(pluginSites(["q", "logits", "attention", "router"])).toEqual(["router"]);
    expect(pluginSites(undefined)).toEqual([]);
  });

  it("have a strip for each reducer, with or without layers", () => {
    const sample = new SampleStore();
    sample.setRow(tensor("router.absmax", [1, 2, 3], [1, 2, 3, 4, 5, 6]), 0, 4);
    sample.setRow(tensor("router.mean", [1, 2, 1], [7, 8]), 0, 4);
    sample.setRow(tensor("end", [1, 2], [9, 10]), 0, 4);
    sample.setRow(tensor("q", [1, 2, 1], [0, 0]), 0, 4);
    const found = pluginStrips(sample, ["router", "end"], 4);
    expect(found.map(({ name, site, layered }) => [name, site, layered])).toEqual([
      ["end", "end", false],
      ["router.absmax", "router", true],
      ["router.mean", "router", true],
    ]);
    expect(found[1]?.strip).toMatchObject({ layers: 2, pixels: 3 });
    expect(found[0]?.strip).toMatchObject({ layers: 1, pixels: 2 });
    expect([...(found[1]?.strip.values ?? [])]).toEqual([1, 2, 3, 4, 5, 6]);
    expect(pluginStrips(sample, ["router"], 5)).toEqual([]);
  });
});
