import { expect, test } from "vitest";
import { aroundPoint, logarithmicRange, steps } from "./axis_range";

test("a logarithmic axis without values does not look for ticks for ever", () => {
  expect(steps(0, 0)).toEqual([]);
  expect(steps(Number(null), 10)).toEqual([]);
  expect(steps(1, Number.POSITIVE_INFINITY)).toEqual([]);
  expect(logarithmicRange(null, null)).toEqual([1, 10]);
  expect(logarithmicRange(0, 5)).toEqual([1, 10]);
});

test("ticks of a logarithmic axis are one, two and five of each power of ten", () => {
  expect(steps(1, 60)).toEqual([1, 2, 5, 10, 20, 50]);
  expect(logarithmicRange(1.15, 10)[0]).toBeCloseTo(1);
});

test("a single report is in the middle of a minute", () => {
  expect(aroundPoint(100, 100)).toEqual([70, 130]);
});
