// Desired and reported state of a device's models: one row per model. Pure.

import type { Device, Difference, Telemetry } from "./types";

export interface ModelStatus {
  model: string;
  desired: string;
  /** Number of the rollout that assigned it, from which it can be rolled back. */
  rollout: number | null;
  running: string;
  state: string;
  cut: string;
  detail: string;
}

/** Its newest measurements, current or not. */
export function latestTelemetry(device: Device): Telemetry | null {
  return device.telemetry ?? device.last_telemetry ?? null;
}

export function modelStatuses(device: Device): ModelStatus[] {
  const differences = new Map((device.differences ?? []).map((difference) => [bare(difference.model), difference]));
  const windows = new Map((latestTelemetry(device)?.models ?? []).map((window) => [window.model, window]));
  const assigned = new Map(device.desired.map((desired) => [desired.model, desired]));
  const reported = device.models.map((model) => ({
    model: model.model,
    desired: assigned.get(bare(model.model))?.release ?? "",
    rollout: assigned.get(bare(model.model))?.deployment ?? null,
    running: model.release,
    state: model.last_state ?? model.state,
    cut: windows.get(model.model)?.row ?? "",
    detail: detailOf(differences.get(bare(model.model)), model.detail),
  }));
  const known = new Set(device.models.map((model) => bare(model.model)));
  const unreported = device.desired.filter((desired) => !known.has(desired.model));
  return [
    ...reported,
    ...unreported.map((desired) => ({
      model: desired.model,
      desired: desired.release,
      rollout: desired.deployment,
      running: "",
      state: "assigned",
      cut: "",
      detail: detailOf(differences.get(desired.model), "not reported by the device yet"),
    })),
  ];
}

function detailOf(difference: Difference | undefined, detail: string): string {
  if (difference === undefined || difference.kind === "as desired") return detail;
  return [difference.kind, difference.detail || detail].filter(Boolean).join(": ");
}

/** A model's name without its version. */
export function bare(model: string): string {
  return model.split("@")[0] ?? model;
}
