import { describe, expect, test } from "vitest";
import { eventName } from "./event_names";
import { has, narrowed, toggled, words } from "./filter";
import { merged } from "./fleet";
import { firstRange, fromBuckets, fromReports, modelsOf, origins, stacked } from "./history";
import { isToken, loginCode, secretIn } from "./login";
import * as proposals from "./proposals";
import { consequences, releaseText, shares, VERBS, type Verb, verbsFor } from "./rollout";
import { EventReader, pauseBefore } from "./sse";
import { byCause, byCut, byRelease, byState, sorted, traffic } from "./summary";
import type { FleetRow, Proposal, Rollout, Telemetry } from "./types";
import { undeploymentLines } from "./undeployment";

const row = (name: string, more: Partial<FleetRow> = {}): FleetRow => ({
  name,
  state: "online",
  group: "doors",
  labels: { site: "oslo" },
  class: "raspberrypi4",
  emulated: true,
  simulated: false,
  version: "0.1.0",
  last_seen: 100,
  models: [{ model: "people@1", release: "aaaa", desired_release: "aaaa", state: "running", row: "cut-1", detail: "" }],
  p95_s: 0.1,
  requests: 10,
  failed: 0,
  fallbacks: 0,
  remote_usable: true,
  celsius: 50,
  causes: [],
  ...more,
});

describe("the filter", () => {
  const fleet = [
    row("cam-1"),
    row("cam-2", { group: "roof", labels: { site: "turku", floor: "2" } }),
    row("cam-3", { causes: [{ cause: "failed: out of memory", detail: "" }], models: [] }),
  ];
  const names = (text: string) => narrowed(fleet, text).map((one) => one.name);

  test("every word must hold; a bare word is looked for in names, groups, classes and labels", () => {
    expect(names("")).toEqual(["cam-1", "cam-2", "cam-3"]);
    expect(names("OSLO cam-")).toEqual(["cam-1", "cam-3"]);
    expect(names("group=roof site=turku floor=2")).toEqual(["cam-2"]);
    expect(names("release=aa is=emulated")).toEqual(["cam-1", "cam-2"]);
    expect(names("release=")).toEqual([]);
    expect(names("constructor=1 toString")).toEqual([]);
  });

  test("a value with spaces is one word, and a word that is toggled twice is gone", () => {
    const once = toggled("site=oslo", "cause", "failed: out of memory");
    expect(words(once)).toEqual(["site=oslo", "cause=failed: out of memory"]);
    expect(names(once)).toEqual(["cam-3"]);
    expect(has(once, "cause", "failed: out of memory")).toBe(true);
    expect(toggled(once, "cause", "failed: out of memory")).toBe("site=oslo");
  });
});

describe("the fleet", () => {
  test("replaces changed rows by name, and drops a device that the answer lacks", () => {
    const before = [row("a"), row("b"), row("c")];
    const after = merged(before, ["b", "c", "d"], [row("d"), row("b", { state: "stale" })]);
    expect(after.map((one) => `${one.name} ${one.state}`)).toEqual(["a online", "b stale", "d online"]);
  });

  test("counts running and pending releases, cuts of online devices, and each cause once per device", () => {
    const coming = { model: "people", release: "", desired_release: "bbbb", state: "assigned", row: "", detail: "" };
    const twice = { cause: "failed: x", detail: "" };
    const fleet = [row("a"), row("b", { state: "stale" }), row("c", { models: [coming], causes: [twice, twice] })];
    expect(byState(fleet)).toMatchObject({ online: 2, stale: 1, offline: 0 });
    expect(byRelease(fleet)).toEqual([
      { model: "people@1", release: "aaaa", running: 2, coming: 0 },
      { model: "people", release: "bbbb", running: 0, coming: 1 },
    ]);
    expect(byCut(fleet)).toEqual([{ key: "people cut-1", count: 1 }]);
    expect(byCause(fleet)).toEqual([{ key: "failed: x", count: 1 }]);
    expect(traffic(fleet)).toMatchObject({ requests: 20, reporting: 2, medianP95: 0.1 });
    expect(traffic([]).medianP95).toBeNull();
    expect(sorted(fleet, "state", true).map((one) => one.name)).toEqual(["b", "a", "c"]);
  });
});

describe("server-sent events", () => {
  test("are parsed alike however the stream is split into chunks", () => {
    const text =
      'event: device\ndata: {"subject":"a"}\n\n: comment\r\nevent: hello\r\ndata: {}\r\n\r\ndata: x\ndata: y\n\n';
    const whole = new EventReader().push(text);
    expect(whole).toEqual([
      { kind: "device", data: '{"subject":"a"}' },
      { kind: "hello", data: "{}" },
      { kind: "message", data: "x\ny" },
    ]);
    for (let size = 1; size < 12; size++) {
      const reader = new EventReader();
      const pieces = text.match(new RegExp(`[^]{1,${size}}`, "g")) ?? [];
      expect(pieces.flatMap((piece) => reader.push(piece))).toEqual(whole);
    }
  });

  test("are reconnected with a back-off that grows, has a limit and jitter", () => {
    expect([pauseBefore(1, 0), pauseBefore(1, 1)]).toEqual([1, 2]);
    expect(pauseBefore(99, 1)).toBe(30);
    expect(pauseBefore(0, 0)).toBe(0.5);
  });
});

describe("a device's history", () => {
  const report = (at: number, requests = 5): Telemetry => ({
    at,
    emulated: true,
    up_bytes_per_s: 1e6,
    rtt_s: 0.05,
    remote_usable: true,
    models: [
      {
        model: "m@1",
        release: "a",
        row: "local",
        requests,
        failed: 0,
        fallbacks: 0,
        switches: 0,
        emulation_overruns: 0,
        up_bytes: 0,
        latency_p50_s: 0.1,
        latency_p95_s: 0.2,
        predicted_s: 0.1,
        device_s: 0.1,
        link_s: 0,
        remote_s: 0,
      },
    ],
  });

  test("has a gap where the device sent nothing, and none where it had no requests", () => {
    const lines = fromReports([report(0), report(10), report(20), report(500), report(510, 0)], "m@1");
    expect(lines.at).toEqual([0, 10, 20, 30, 500, 510]);
    expect(lines.device).toEqual([0.1, 0.1, 0.1, null, 0.1, null]);
    expect(lines.requests).toEqual([5, 5, 5, null, 5, 0]);
    expect(modelsOf([report(0)])).toEqual(["m@1"]);
    const busy = {
      ...report(9),
      models: report(9).models.flatMap((one) => [{ ...one, model: "a@1", requests: 0 }, one]),
    };
    expect(modelsOf([busy])).toEqual(["m@1", "a@1"]);
    expect([firstRange(1_000, 1_600).name, firstRange(1_000, 90_000).name]).toEqual(["1 h", "24 h"]);
  });

  test("events have names for people, also those that are new", () => {
    const named = ["device.born", "rollout.rolled_back", "constructor", "device.flooding_offload"];
    expect(named.map((action) => eventName({ action }))).toEqual([
      "connected",
      "rollout rolled back",
      "constructor",
      "floods an offload server",
    ]);
    expect(eventName({ action: "deployment.made", detail: { release: "nothing" } })).toBe("undeployed");
  });

  test("in buckets joins the device's figures with the model's, and has gaps where data is missing", () => {
    const model = [
      { at: 0, span_s: 3600, requests: 5, latency_p95_s: 0.2, latency_p95_worst_s: 0.4, origins: { simulated: 5 } },
      { at: 3600, span_s: 3600, requests: 0, origins: { real: 2 } },
    ];
    const device = [
      { at: 3600, span_s: 3600, watts: 3, up_bytes_per_s: 0 },
      { at: 36_000, span_s: 3600 },
    ];
    const lines = fromBuckets(model, device);
    expect(lines.at).toEqual([0, 3600, 7200, 36_000]);
    expect(lines.p95).toEqual([0.2, null, null, null]);
    expect(lines.worst).toEqual([0.4, null, null, null]);
    expect(lines.watts).toEqual([null, 3, null, null]);
    expect(lines.uplink).toEqual([null, null, null, null]);
    expect(origins(model)).toEqual({ simulated: 5, real: 2 });
  });

  test("of a cascade has who answered in per cent, and the promise beside what audits measured so far", () => {
    const cascade = { sure: 6, escalated: 3, unsure: 1 };
    const measured = { audited: 40, changed: 1, share: 0.025, at_least: 0.0013, at_most: 0.11 };
    const lines = fromBuckets([
      { at: 0, span_s: 60, requests: 10, cascade, cascade_allowed_max: 0.02, cascade_measured: measured },
      { at: 60, span_s: 60, requests: 0, cascade: { sure: 0, escalated: 0, unsure: 0 }, cascade_allowed_max: 0.02 },
      { at: 120, span_s: 60, requests: 4, still: { repeated: 9 }, still_allowed_max: 0.01 },
    ]);
    expect([lines.sure, lines.escalated, lines.unsure]).toEqual([
      [60, null, null],
      [30, null, null],
      [10, null, null],
    ]);
    expect(lines.allowed).toEqual([2, 2, null]);
    expect(lines.changed).toEqual([2.5, null, null]);
    expect(lines.changedMost).toEqual([11, null, null]);
    expect([lines.stillAllowed, lines.stillChanged]).toEqual([
      [null, null, 1],
      [null, null, null],
    ]);
  });

  test("is stacked", () => {
    expect(stacked([1, null, 3], [1, null, 1])).toEqual([
      [1, null, 3],
      [2, null, 4],
    ]);
  });
});

describe("a rollout", () => {
  const rollout = (state: string, more: Partial<Rollout> = {}): Rollout => ({
    id: 7,
    state,
    reason: "",
    waits_for: "",
    offline: 0,
    withdraws: false,
    model: "people@2",
    release: "b".repeat(64),
    targets: ["all"],
    created_by: "operator",
    created: 1,
    began: 2,
    ended: null,
    following: false,
    superseded_by: null,
    stage: 1,
    devices: 10,
    emulated: 0,
    simulated: 10,
    states: { succeeded: 1, failed: 1, queued: 8 },
    stages: [
      {
        number: 1,
        size: "2",
        devices: 2,
        emulated: 0,
        simulated: 2,
        began: 2,
        states: {},
        succeeded: 1,
        failures: 1,
        open: 0,
        needs_approval: false,
      },
      {
        number: 2,
        size: "100%",
        devices: 8,
        emulated: 0,
        simulated: 8,
        began: null,
        states: {},
        succeeded: 0,
        failures: 0,
        open: 8,
        needs_approval: true,
      },
    ],
    failures: [{ kind: "p95", count: 1, example: "", devices: ["a"] }],
    terms: {},
    ...more,
  });

  test("offers the actions that its state allows", () => {
    expect(verbsFor(rollout("waiting"))).toEqual(["approve", "pause", "abort", "rollback"]);
    expect(verbsFor(rollout("paused"))).toEqual(["resume", "abort", "rollback"]);
    expect(verbsFor(rollout("scheduled", { began: null }))).toEqual(["pause", "abort"]);
    expect(verbsFor(rollout("finished"))).toEqual(["rollback"]);
    expect(verbsFor(rollout("rolled back"))).toEqual([]);
  });

  test("names the devices that an action will affect", () => {
    expect(consequences(rollout("waiting"), "approve")[0]).toContain("8 devices will be assigned");
    expect(consequences(rollout("running"), "abort").join(" ")).toContain("8 devices will keep the present one");
    expect(consequences(rollout("running"), "rollback")[0]).toContain("2 devices with an assignment");
    const single = rollout("running", { devices: 1, states: { assigned: 1 } });
    expect(consequences(single, "rollback")[0]).toMatch(/^1 device with an assignment of .* will be assigned/);
  });

  test("of an undeployment says that the model is removed, and never that a release is assigned", () => {
    const undeployment = (state: string) => rollout(state, { withdraws: true, release: "nothing" });
    expect(consequences(undeployment("waiting"), "approve")[0]).toContain("people@2 will be removed from 8 devices");
    expect(consequences(undeployment("paused"), "resume")[0]).toContain("removed from 8 further devices");
    expect(consequences(undeployment("running"), "pause").join(" ")).toContain("8 devices will keep it for now");
    expect(consequences(undeployment("running"), "abort").join(" ")).toContain("1 device that removed it");
    expect(consequences(undeployment("finished"), "rollback")[0]).toContain("the release again that each ran before");
    const texts = (Object.keys(VERBS) as Verb[]).flatMap((verb) => consequences(undeployment("running"), verb));
    expect(texts.join(" ")).not.toContain("release nothing");
    expect([releaseText(undeployment("running")), releaseText(rollout("running"))]).toEqual([
      "undeployment",
      "bbbbbbbb",
    ]);
  });

  test("draws its progress in the order of a device's states", () => {
    expect(shares({ queued: 2, fetching: 1, succeeded: 3 }).map((one) => one.title)).toEqual([
      "succeeded",
      "in progress",
      "queued",
    ]);
  });

  test("does not call a device failed that an operator rolled back", () => {
    expect(shares({ "rolled back": 1 }).map((one) => one.title)).toEqual(["rolled back"]);
    expect(shares({ "rolled back": 1, failed: 2, "timed out": 1 }).map((one) => [one.title, one.count])).toEqual([
      ["failed", 3],
      ["rolled back", 1],
    ]);
  });
});

describe("an undeployment's confirmation", () => {
  const device = (name: string, release: string, state = "online") => ({
    device: name,
    release,
    model: "people@2",
    state,
  });

  test("names what ends where, who hears of it later, and what it supersedes", () => {
    const devices = [device("cam-1", "b".repeat(64)), device("cam-2", "b".repeat(64), "offline"), device("cam-3", "")];
    const preview = { rollout: null, model: "people", devices, supersedes: [{ rollout: 4, devices: 1 }] };
    expect(undeploymentLines(preview, ["1", "100%"]).slice(0, 5)).toEqual([
      "people@2, release bbbbbbbb ends on 2 devices: cam-1, cam-2.",
      "people@2, not yet assigned ends on 1 device: cam-3.",
      "In stages: 1, then 100%.",
      "Not online now, and told when they return: cam-2.",
      "Rollout 4 is superseded on 1 device of these.",
    ]);
  });

  test("names a dozen of a large fleet and counts the others", () => {
    const devices = Array.from({ length: 1_000 }, (_, number) => device(`cam-${number}`, "b".repeat(64)));
    const [line] = undeploymentLines({ rollout: null, model: "people", devices, supersedes: [] }, []);
    expect(line).toMatch(/cam-11 and 988 more\.$/);
  });
});

describe("a proposal", () => {
  const proposal = (id: number, state: string, model = "people@2"): Proposal => ({
    id,
    state,
    model,
    release: "a",
    device_class: "coral",
    group: null,
    devices: ["a", "b"],
    created: 1,
    decided: null,
    decided_by: null,
    result: null,
    reason: "slower",
    gain: 0.25,
    gain_between: [-0.02, 0.4],
    measured_devices: 2,
    basis: "measured",
    drift: [],
    rows: [],
    proposed_rows: [],
  });

  test("belongs to its model in any version; open ones come first", () => {
    const all = [proposal(1, "open"), proposal(2, "applied"), proposal(3, "open", "other@1"), proposal(4, "dismissed")];
    expect(proposals.proposalsOf(all, "people@3").map((one) => one.id)).toEqual([1, 4, 2]);
  });

  test("lists the drift, largest first, without noise", () => {
    const drift = (quantity: string, factor: number | null) => ({
      quantity,
      unit: "s",
      assumed: 1,
      measured: 1,
      factor,
    });
    const rows = proposals.drifted([drift("a", 1.05), drift("b", 0.2), drift("c", 3), drift("d", null)]);
    expect(rows.map((row) => row.quantity)).toEqual(["b", "c"]);
  });

  test("states its gain, the share of devices that lose by it, and its consequences", () => {
    expect(proposals.gain(proposal(1, "open"))).toBe(
      "25 % less (a quarter gains at most −2 %, a quarter at least 40 %)",
    );
    expect(proposals.consequences(proposal(1, "open"), "accept")[0]).toContain("2 devices: a tenth of them first");
    expect(proposals.amount(125_000, "bytes/s")).toBe("1 Mbit/s");
  });
});

describe("what an operator pastes to sign in", () => {
  test("a code is found in the address, and anything but a token is taken for a code", () => {
    expect(loginCode("#login=edgesplit_code_x")).toBe("edgesplit_code_x");
    expect(loginCode("#/devices/cam-1?q=a")).toBe(null);
    expect(secretIn(" https://hub:8443/#login=edgesplit_code_x ")).toBe("edgesplit_code_x");
    expect([isToken("edgesplit_op_x"), isToken("edgesplit_code_x"), isToken("edgesplit_cod")]).toEqual([
      true,
      false,
      false,
    ]);
  });
});
