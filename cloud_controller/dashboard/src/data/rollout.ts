// The actions that a rollout allows in its state, and their consequences as text. Pure.

import { plural, short } from "../format";
import type { Rollout } from "./types";

export type Verb = "pause" | "resume" | "approve" | "abort" | "rollback";

export const VERBS: Record<Verb, { title: string; danger: boolean }> = {
  approve: { title: "Approve the next stage", danger: false },
  resume: { title: "Resume", danger: false },
  pause: { title: "Pause", danger: false },
  abort: { title: "Abort", danger: true },
  rollback: { title: "Roll back", danger: true },
};

const ENDED = new Set(["aborted", "rolled back", "finished", "failed", "superseded"]);

export function ended(rollout: Rollout): boolean {
  return ENDED.has(rollout.state);
}

export function verbsFor(rollout: Rollout): Verb[] {
  const { state } = rollout;
  const allowed: Verb[] = [];
  if (state === "waiting") allowed.push("approve");
  if (state === "paused") allowed.push("resume");
  if (["scheduled", "waiting", "running"].includes(state)) allowed.push("pause");
  if (!ended(rollout) && state !== "aborting" && state !== "rolling back") allowed.push("abort");
  if (rollout.began !== null && state !== "rolled back" && state !== "rolling back") allowed.push("rollback");
  return allowed;
}

/** What is assigned: the release, or that an undeployment removes the model. */
export function releaseText(rollout: Rollout): string {
  return rollout.withdraws ? "undeployment" : short(rollout.release);
}

/** What the controller will do when this is confirmed. */
export function consequences(rollout: Rollout, verb: Verb): string[] {
  return rollout.withdraws ? ofUndeployment(rollout, verb) : ofDeployment(rollout, verb);
}

function ofUndeployment(rollout: Rollout, verb: Verb): string[] {
  const { model } = rollout;
  const { queued, reached, succeeded, next, failures } = progress(rollout);
  switch (verb) {
    case "approve":
      return [
        next === undefined
          ? "The next stage begins."
          : `Stage ${next.number} (${next.size}) begins: ${model} will be removed from ${plural(next.devices, "device")}.`,
        ...failures,
      ];
    case "resume":
      return [
        `${model} will be removed from ${plural(queued, "further device")}, at the rate and in the stages of the terms.`,
        "Devices of the current stage that have not finished no longer delay the rollout.",
      ];
    case "pause":
      return [
        `${model} is removed from no further device: ${plural(queued, "device")} will keep it for now.`,
        `${plural(reached, "device")} that were told to remove it will do so.`,
      ];
    case "abort":
      return [
        `${model} is removed from no further device, and the rollout ends: ${plural(queued, "device")} will keep it.`,
        `${plural(succeeded, "device")} that removed it will stay without it. To bring it back there, roll back instead.`,
      ];
    case "rollback":
      return [
        `${plural(reached, "device")} that were told to remove ${model} will be assigned the release again that each ran before.`,
        "Its files are fetched again where the device has deleted them.",
      ];
  }
}

function progress(rollout: Rollout) {
  const queued = rollout.states.queued ?? 0;
  return {
    queued,
    reached: rollout.devices - queued - (rollout.states.skipped ?? 0) - (rollout.states.superseded ?? 0),
    succeeded: rollout.states.succeeded ?? 0,
    next: rollout.stages.find((stage) => stage.number === rollout.stage + 1),
    failures: rollout.failures.length > 0 ? [`${plural(failed(rollout), "device")} failed so far.`] : [],
  };
}

function ofDeployment(rollout: Rollout, verb: Verb): string[] {
  const { queued, reached, succeeded, next, failures } = progress(rollout);
  const release = `${rollout.model}, release ${short(rollout.release)}`;
  switch (verb) {
    case "approve":
      return [
        next === undefined
          ? "The next stage begins."
          : `Stage ${next.number} (${next.size}) begins: ${plural(next.devices, "device")} will be assigned ${release}.`,
        ...failures,
      ];
    case "resume":
      return [
        `${plural(queued, "device")} without an assignment will be assigned ${release}, at the rate and in the stages of the terms.`,
        "Devices of the current stage that have not finished no longer delay the rollout.",
      ];
    case "pause":
      return [
        `No further device is assigned the release: ${plural(queued, "device")} will keep the present one.`,
        `${plural(reached, "device")} with an assignment will continue.`,
      ];
    case "abort":
      return [
        `No further device is assigned the release, and the rollout ends: ${plural(queued, "device")} will keep the present one.`,
        `${plural(succeeded, "device")} where it succeeded will keep it. To return those too, roll back instead.`,
      ];
    case "rollback":
      return [
        `${plural(reached, "device")} with an assignment of ${release} will be assigned the previous release again.`,
        "A release that a device no longer stores is fetched again. A device that ran nothing of the model before runs nothing of it afterwards.",
      ];
  }
}

export function failed(rollout: Rollout): number {
  return rollout.failures.reduce((sum, failure) => sum + failure.count, 0);
}

/** Parts of the progress bar, in the order in which a device passes through them. */
export const SHARES: readonly { tone: string; title: string; states: readonly string[] }[] = [
  { tone: "good", title: "succeeded", states: ["succeeded"] },
  { tone: "busy", title: "in progress", states: ["assigned", "fetching", "trial"] },
  { tone: "bad", title: "failed", states: ["failed", "timed out"] },
  { tone: "back", title: "rolled back", states: ["rolled back"] },
  { tone: "left", title: "left out", states: ["skipped", "superseded"] },
  { tone: "queued", title: "queued", states: ["queued"] },
];

export function shares(states: Record<string, number>): { tone: string; title: string; count: number }[] {
  return SHARES.map(({ tone, title, states: included }) => ({
    tone,
    title,
    count: included.reduce((sum, state) => sum + (states[state] ?? 0), 0),
  })).filter((share) => share.count > 0);
}
