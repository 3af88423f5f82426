import { expect, test } from "vitest";
import { detailText } from "./event_names";

test("details of events were JSON", () => {
  const digest = "bc042ba303cc".repeat(5).slice(0, 64);
  expect(detailText({ serial: "4".repeat(40), public_key_sha256: digest })).toBe(
    "serial 444444444444… · public key bc042ba303cc…",
  );
  expect(detailText({ stages: ["10%", "100%"], fresh: true, labels: { site: "north_1" }, group: null, why: "" })).toBe(
    "stages 10%, 100% · fresh yes · labels site north_1",
  );
  expect(detailText({ devices: [], labels: {} })).toBe("devices none · labels none");
});
