import { expect, it } from "vitest";
import { loneValues } from "./lone_values";

it("finds the minutes that stand alone, which were not drawn in the first hour", () => {
  expect(loneValues([])).toEqual([]);
  expect(loneValues([5])).toEqual([0]);
  expect(loneValues([5, 6])).toEqual([]);
  expect(loneValues([5, null, 0, null, 7, 8, undefined, 9])).toEqual([0, 2, 7]);
  expect(loneValues([null, null])).toEqual([]);
});
