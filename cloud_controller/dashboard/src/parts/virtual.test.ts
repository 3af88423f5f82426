import { expect, test } from "vitest";
import { rowsInView } from "./virtual";

test("a table far below a phone's window is measured once, and not for ever", () => {
  expect(rowsInView(2_000, 844, 60, 1_000)).toEqual([0, 0]);
});

test("only rows in view are drawn, and a few around them", () => {
  expect(rowsInView(300, 900, 32, 1_000)).toEqual([0, 27]);
  expect(rowsInView(-3_200, 900, 32, 1_000)).toEqual([92, 137]);
  expect(rowsInView(-32_000, 900, 32, 20)).toEqual([20, 20]);
});
