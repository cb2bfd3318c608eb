import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { placeAt as pixelPlace, frameOf, scalesOf, type HeatPicture } from "./heatPicture";
import { Cells } from "../../../render/cells";
import { probabilityMap } from "../../../render/maps";

describe("layout of a heat map", () => {
  const picture: HeatPicture = {
    cells: new Cells(20, 10),
    group: 1,
    map: probabilityMap("dark"),
    rows: { from: 2, to: 8 },
    columns: { from: 5, to: 15 },
    rowLabels: { text: String, size: 40 },
    columnLabels: { text: String, size: 20 },
    gaps: false,
    marks: [],
  };
  const frame = frameOf(picture, 241, 141);

  it("finds the place under every pixel, and none beside the cells", () => {
    const scales = scalesOf(picture, frame);
    fc.assert(
      fc.property(fc.integer({ min: 2, max: 7 }), fc.integer({ min: 5, max: 14 }), (row, column) => {
        const [x, y] = [scales.x.toPixel(column + 0.5), scales.y.toPixel(row + 0.5)];
        expect(pixelPlace(picture, frame, x, y)).toEqual({ row, column });
      }),
    );
    expect(pixelPlace(picture, frame, 20, 60)).toBeNull();
    expect(pixelPlace(picture, frame, 100, 10)).toBeNull();
  });
});
