// Names of events for people; `edgectl audit` and searches have the events' own.

const NAMES: Record<string, string> = {
  "agent.pushed": "agent version pushed",
  "deployment.made": "deployed",
  "device.ahead": "has a newer statement than this controller",
  "device.born": "connected",
  "device.cascade_changed": "a cascade changes too many answers",
  "device.claimed": "claimed",
  "device.copied": "two agents use this name",
  "device.described": "group or labels changed",
  "device.died": "disconnected",
  "device.endpoint_flooded": "a program floods its local endpoint",
  "device.enrolled": "enrolled",
  "device.flooding": "held off: too many messages",
  "device.flooding_offload": "floods an offload server",
  "device.gateway_flooded": "a device floods this gateway",
  "device.led": "gateway changed",
  "device.logs": "log requested",
  "device.removed": "removed",
  "device.renewed": "certificate renewed",
  "device.repeated_answers_changed": "repeated answers changed too often",
  "device.revocation_list_expired": "gateway's revocation list expired",
  "device.revoked": "revoked",
  "gateway.appointed": "made a gateway",
  "model.pushed": "model pushed",
  "model.removed": "model removed",
  "release.exported": "release exported",
  "release.made": "release signed",
  "release.removed": "release removed",
  "replan.policy": "re-planning policy set",
  "replan.proposed": "another plan proposed",
  "revocations.outdated": "revocation list outdated",
  "rollout.began": "rollout began",
  "rollout.failing": "rollout is failing",
  "rollout.joined": "devices joined the rollout",
  "rollout.stage": "next stage began",
  "rollout.superseded_by": "superseded by a newer rollout",
  "rollout.waiting": "rollout waits",
};

/** An event without a name of its own: `rollout.rolled_back` becomes "rollout rolled back". */
export function eventName({ action, detail }: { action: string; detail?: Record<string, unknown> }): string {
  if (action === "deployment.made" && detail?.release === "nothing") return "undeployed";
  return Object.hasOwn(NAMES, action) ? (NAMES[action] as string) : action.replaceAll(/[._]/g, " ");
}

/** Digests and serial numbers cut to their first characters; `edgectl audit` has the whole. */
export function shortened(text: string): string {
  return text.replace(/\b(?:[0-9a-f]{40,}|\d{30,})\b/g, (long) => `${long.slice(0, 12)}…`);
}

/** An event's details as "serial 4138… · stages 10%, 100%". */
export function detailText(detail: Record<string, unknown>): string {
  return Object.entries(detail)
    .filter(([, value]) => value !== null && value !== "")
    .map(([key, value]) => shortened(`${key.replaceAll("_", " ").replace(/ sha256$/, "")} ${plain(value)}`))
    .join(" · ");
}

function plain(value: unknown): string {
  if (Array.isArray(value)) return value.map(plain).join(", ") || "none";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "object" || value === null) return String(value);
  const parts = Object.entries(value).map(([key, part]) => `${key.replaceAll("_", " ")} ${plain(part)}`);
  return parts.join(", ") || "none";
}
