import { describe, expect, test } from "vitest";
import { answeredText, factsOf, isBroken, measuredText, promiseText } from "./audits";
import type { CascadeAudits, MeasuredShare } from "./types";

const measured: MeasuredShare = {
  audited: 412,
  changed: 3,
  share: 3 / 412,
  at_least: 0.002,
  at_most: 0.019,
  allowed: 0.02,
  unaudited: 7,
  alarms: 0,
};
const cascade: CascadeAudits = {
  ...measured,
  sure: 700,
  escalated: 250,
  unsure: 50,
  threshold: 0.812345,
  answered: { large: 250, small: 750 },
};
const text = (facts: ReturnType<typeof factsOf>) => facts.map((one) => `${one.name}: ${one.text}`);

describe("answers that may change", () => {
  test("the promise stands beside the measurement", () => {
    expect(promiseText(measured)).toBe("allowed 2 %, 3 of 412 audited differed (0.2 % to 1.9 %, 90 % sure)");
    expect(measuredText({ ...measured, audited: 0, share: null, at_least: null, at_most: null })).toBe(
      "none audited yet",
    );
  });

  test("who answers, by share, the most frequent first", () => {
    expect(answeredText(cascade.answered)).toBe("small 75 %, large 25 %");
    expect(answeredText({})).toBe("–");
    expect(text(factsOf({ cascade, still: null }))).toEqual([
      "who answers: small 75 %, large 25 %",
      "escalated: 25 % (scores below 0.8123)",
      "unsure: 50 answers, 5 %",
      "changed by the cascade: allowed 2 %, 3 of 412 audited differed (0.2 % to 1.9 %, 90 % sure)",
      "unaudited: 7 frames",
      "alarms: 0",
    ]);
  });

  test("a share that is shown to exceed what is allowed, alarms and a threshold that escalates all warn", () => {
    expect(isBroken(measured)).toBe(false);
    expect(isBroken({ ...measured, at_least: 0.021 })).toBe(true);
    const warning = factsOf({
      cascade: { ...cascade, at_least: 0.03, alarms: 2, threshold: null },
      still: null,
    }).filter((one) => one.warns);
    expect(warning.map((one) => one.name)).toEqual(["escalated", "changed by the cascade", "alarms"]);
  });

  test("still frames have figures of their own", () => {
    const still = { ...measured, repeated: 1234 };
    expect(text(factsOf({ cascade: null, still }))[0]).toBe("repeated: 1 234 answers");
    expect(factsOf({ cascade, still })).toHaveLength(10);
    expect(factsOf({ cascade: null, still: null })).toEqual([]);
  });
});
