// Other tables that the controller proposes, in words. Pure.

import { bytes, figure, percent, plural, rate, seconds } from "../format";
import type { Drift, Proposal, ProposedRow } from "./types";

/** Those of one model, the open ones first, then the newest. */
export function proposalsOf(all: readonly Proposal[], model: string): Proposal[] {
  const name = nameOf(model);
  return all
    .filter((one) => nameOf(one.model) === name)
    .sort((a, b) => Number(b.state === "open") - Number(a.state === "open") || b.id - a.id);
}

function nameOf(model: string): string {
  return model.split("@")[0] ?? model;
}

/** What drifted by more than a tenth, the farthest first. */
export function drifted(drift: readonly Drift[]): Drift[] {
  const far = (one: Drift) => (one.factor === null || one.factor <= 0 ? 0 : Math.abs(Math.log(one.factor)));
  return drift.filter((one) => far(one) > Math.log(1.1)).sort((a, b) => far(b) - far(a));
}

export function amount(value: number, unit: string): string {
  if (unit === "bytes/s") return rate(value);
  if (unit === "bytes") return bytes(Math.round(value));
  return unit === "s" ? seconds(value) : `${figure(value)} ${unit}`;
}

/** What it is predicted to bring. */
export function gain(proposal: Proposal): string {
  const broken = proposal.broken_limits;
  const limits =
    broken !== undefined && broken.now > broken.then
      ? `; limits broken in ${percent(broken.then, 1)} of the time instead of ${percent(broken.now, 1)}`
      : "";
  const [low, high] = proposal.gain_between;
  return `${share(proposal.gain)} less (a quarter gains at most ${share(low)}, a quarter at least ${share(high)})${limits}`;
}

function share(part: number): string {
  return part < 0 ? `−${percent(-part, 1)}` : percent(part, 1);
}

/** Cuts of a table, one after the other. */
export function cuts(rows: readonly ProposedRow[]): string {
  const words = rows.map((row) =>
    row.up_bytes === 0 ? "all on the device" : row.split_after === "" ? "all remote" : `after ${row.split_after}`,
  );
  return [...new Set(words)].join(", ") || "none";
}

/** What the controller will do when it is accepted, or dismissed. */
export function consequences(proposal: Proposal, verb: "accept" | "dismiss"): string[] {
  return verb === "accept"
    ? [
        `Another cut of ${proposal.model} for ${proposal.device_class} is made with what was measured, signed by the planner's key, and rolled out to ${plural(proposal.devices.length, "device")}: a tenth of them first.`,
        "Devices fetch only what they do not have: of a re-cut model, that is graphs without weights.",
      ]
    : [
        `${plural(proposal.devices.length, "device")} keep the table that they have.`,
        "For a while nothing is proposed for them again.",
      ];
}
