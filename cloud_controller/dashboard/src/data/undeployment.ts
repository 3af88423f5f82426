// What an undeployment ends, and where, as text. Pure.

import { plural, short } from "../format";
import type { Undeployed } from "./types";

/** Devices that are named; of the others the number is given. */
const MOST_NAMED = 12;

export function undeploymentLines(preview: Undeployed, stages: readonly string[]): string[] {
  const byRelease = new Map<string, string[]>();
  for (const { device, release, model } of preview.devices) {
    const what = release === "" ? `${model}, not yet assigned` : `${model}, release ${short(release)}`;
    byRelease.set(what, [...(byRelease.get(what) ?? []), device]);
  }
  const away = preview.devices.filter((device) => device.state !== "online").map(({ device }) => device);
  return [
    ...[...byRelease].map(
      ([what, devices]) => `${what} ends on ${plural(devices.length, "device")}: ${named(devices)}.`,
    ),
    ...(stages.length > 0 ? [`In stages: ${stages.join(", then ")}.`] : []),
    ...(away.length > 0 ? [`Not online now, and told when they return: ${named(away)}.`] : []),
    ...preview.supersedes.map(
      ({ rollout, devices }) => `Rollout ${rollout} is superseded on ${plural(devices, "device")} of these.`,
    ),
    "Each device stops the model and frees its files. While the controller has the release, the rollout can be rolled back.",
  ];
}

function named(devices: readonly string[]): string {
  const more = devices.length - MOST_NAMED;
  return devices.slice(0, MOST_NAMED).join(", ") + (more > 0 ? ` and ${more} more` : "");
}
