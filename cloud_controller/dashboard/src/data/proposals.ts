// Proposals of re-planning as text. Pure.

import { bytes, cutName, figure, percent, plural, rate, seconds } from "../format";
import type { Drift, Proposal, ProposedRow } from "./types";

/** Those of one model, the open ones first, then the newest. */
export function proposalsOf(all: readonly Proposal[], model: string): Proposal[] {
  const name = nameOf(model);
  return all
    .filter((proposal) => nameOf(proposal.model) === name)
    .sort((a, b) => Number(b.state === "open") - Number(a.state === "open") || b.id - a.id);
}

function nameOf(model: string): string {
  return model.split("@")[0] ?? model;
}

/** Quantities that drifted by more than a tenth, the largest drift first. */
export function drifted(drift: readonly Drift[]): Drift[] {
  const size = ({ factor }: Drift) => (factor === null || factor <= 0 ? 0 : Math.abs(Math.log(factor)));
  return drift.filter((entry) => size(entry) > Math.log(1.1)).sort((a, b) => size(b) - size(a));
}

export function amount(value: number, unit: string): string {
  if (unit === "bytes/s") return rate(value);
  if (unit === "bytes") return bytes(Math.round(value));
  return unit === "s" ? seconds(value) : `${figure(value)} ${unit}`;
}

/** The predicted gain. */
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
  const words = rows.map((row) => cutName({ ...row, local: row.up_bytes === 0 }));
  return [...new Set(words)].join(", ") || "none";
}

/** What the controller will do when it is accepted, or dismissed. */
export function consequences(proposal: Proposal, verb: "accept" | "dismiss"): string[] {
  return verb === "accept"
    ? [
        `Another cut of ${proposal.model} for ${proposal.device_class} is planned from the measurements, signed by the planner's key, and rolled out to ${plural(proposal.devices.length, "device")}: a tenth of them first.`,
        "Devices fetch only what they do not have: of a re-cut model, that is graphs without weights.",
      ]
    : [
        `${plural(proposal.devices.length, "device")} will keep the present table.`,
        "For some time no further table is proposed for them.",
      ];
}
