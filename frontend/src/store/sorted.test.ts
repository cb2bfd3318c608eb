import { expect, it } from "vitest";
import { oldest, position } from "./sorted";

it("finds positions", () => {
  expect([0, 1, 2, 3, 9].map((value) => position([1, 2, 4], value))).toEqual([0, 0, 1, 2, 3]);
  expect(position([], 1)).toBe(0);
});

it.each([
  [[0, 0, 0], 3, []],
  [[0, 0, 0], 2, [0]],
  [[1, 1, 0, 0], 3, [2]],
  [[2, 1, 0, 1, 0], 2, [2, 4, 1]],
])("of attempts %j beyond %i the oldest are %j", (attempts, capacity, wanted) => {
  expect([...oldest(attempts, capacity)]).toEqual(wanted);
});
