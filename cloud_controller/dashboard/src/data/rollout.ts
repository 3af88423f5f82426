// What an operator may ask of a rollout now, and what will come of it, in words. Pure.

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
  const found: Verb[] = [];
  if (state === "waiting") found.push("approve");
  if (state === "paused") found.push("resume");
  if (["scheduled", "waiting", "running"].includes(state)) found.push("pause");
  if (!ended(rollout) && state !== "aborting" && state !== "rolling back") found.push("abort");
  if (rollout.began !== null && state !== "rolled back" && state !== "rolling back") found.push("rollback");
  return found;
}

/** What the controller will do when this is confirmed. */
export function consequences(rollout: Rollout, verb: Verb): string[] {
  const queued = rollout.states.queued ?? 0;
  const reached = rollout.devices - queued - (rollout.states.skipped ?? 0) - (rollout.states.superseded ?? 0);
  const succeeded = rollout.states.succeeded ?? 0;
  const what = `${rollout.model}, release ${short(rollout.release)}`;
  const next = rollout.stages.find((stage) => stage.number === rollout.stage + 1);
  switch (verb) {
    case "approve":
      return [
        next === undefined
          ? "The next stage begins."
          : `Stage ${next.number} (${next.size}) begins: ${plural(next.devices, "device")} will be told to run ${what}.`,
        ...(rollout.failures.length > 0 ? [`${plural(failed(rollout), "device")} failed so far.`] : []),
      ];
    case "resume":
      return [
        `${plural(queued, "device")} not told yet will be told to run ${what}, at the rate and in the stages asked for.`,
        "What was missing of the stage that ran is excused.",
      ];
    case "pause":
      return [
        `No further device is told: ${plural(queued, "device")} keep what they run.`,
        `${plural(reached, "device")} that were told go on.`,
      ];
    case "abort":
      return [
        `No further device is told, and this rollout ends: ${plural(queued, "device")} keep what they run.`,
        `${plural(succeeded, "device")} that run it well keep it. To take those back too, roll back instead.`,
      ];
    case "rollback":
      return [
        `${plural(reached, "device")} that were told of ${what} are told to run again what each ran before.`,
        "Releases that a device no longer has are fetched again; none is left without one.",
      ];
  }
}

export function failed(rollout: Rollout): number {
  return rollout.failures.reduce((sum, one) => sum + one.count, 0);
}

/** Parts of a bar, in the order in which a device passes through them. */
export const SHARES: readonly { tone: string; title: string; states: readonly string[] }[] = [
  { tone: "good", title: "succeeded", states: ["succeeded"] },
  { tone: "busy", title: "on the way", states: ["assigned", "fetching", "trial"] },
  { tone: "bad", title: "failed", states: ["failed", "timed out", "rolled back"] },
  { tone: "left", title: "left out", states: ["skipped", "superseded"] },
  { tone: "queued", title: "queued", states: ["queued"] },
];

export function shares(states: Record<string, number>): { tone: string; title: string; count: number }[] {
  return SHARES.map(({ tone, title, states: some }) => ({
    tone,
    title,
    count: some.reduce((sum, state) => sum + (states[state] ?? 0), 0),
  })).filter((one) => one.count > 0);
}
