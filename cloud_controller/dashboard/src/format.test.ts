import { expect, test } from "vitest";
import { age, bytes, count, cutName, figure, percent, rate, seconds, short, times } from "./format";

test("figures have three digits and no exponent", () => {
  expect([0, 0.001234, 0.12, 1.5, 15.25, 152.4, 15_240].map(figure)).toEqual([
    "0",
    "0.001",
    "0.12",
    "1.5",
    "15.3",
    "152",
    "15240",
  ]);
  expect(figure(Number.NaN)).toBe("–");
});

test("units are those that people use", () => {
  expect([0.0000005, 0.0123, 1.5].map(seconds)).toEqual(["0.5 µs", "12.3 ms", "1.5 s"]);
  expect([rate(731_250), rate(2e8)]).toEqual(["5.85 Mbit/s", "1.6 Gbit/s"]);
  expect([bytes(12), bytes(1234), bytes(5e6)]).toEqual(["12 B", "1.23 kB", "5 MB"]);
  expect([age(0, 59), age(0, 3_600), age(0, 90_000), age(0, 864_000)]).toEqual(["59 s", "1 h", "25 h", "10 d"]);
  expect([percent(1, 3), percent(1, 10_000), percent(0, 5), percent(1, 0)]).toEqual(["33 %", "<0.1 %", "0 %", "–"]);
  expect([count(12_345), times(1.834), short("0123456789abcdef")]).toEqual(["12 345", "1.83 ×", "01234567"]);
});

test("a cut has the name that commands and metrics have", () => {
  const row = { name: "cut-1", split_after: "Equal", local: false };
  expect(cutName(row)).toBe("cut-1: after Equal");
  expect(cutName({ ...row, name: "local", local: true })).toBe("local: all on the device");
  expect(cutName({ ...row, name: "remote", split_after: "" })).toBe("remote: all beyond the link");
});

test("an unknown figure is not shown as zero", () => {
  expect([seconds(null), rate(undefined), bytes(null), age(null, 5), times(null)]).toEqual(["–", "–", "–", "–", "–"]);
});
