import { describe, expect, it } from "vitest";
import { ApiError } from "../api/client";
import { placeAt, problemPlaces } from "./problems";

describe("what the hub refuses", () => {
  it("is found at its field and column, however it is told", () => {
    const told = new ApiError(422, "no", "", {
      places: [{ place: "capture.expression.qkv", column: 6, message: "there is no median" }],
    });
    expect(placeAt(problemPlaces(told), "capture.expression.qkv")).toMatchObject({ column: 6 });
    const spoken = new ApiError(422, "body.capture.expression.mlp: Value error, column 3: write abs", "");
    expect(placeAt(problemPlaces(spoken), "capture.expression.mlp")).toMatchObject({ column: 3 });
    expect(problemPlaces(new ApiError(409, "x: y", ""))).toEqual([]);
  });
});
