// What the controller wants of a device beside what the device says: one line per model. Pure.

import type { Device, Difference, Telemetry } from "./types";

export interface Served {
  model: string;
  wanted: string;
  running: string;
  state: string;
  cut: string;
  why: string;
}

/** Its newest measurements, of now or not: the page says which. */
export function told(device: Device): Telemetry | null {
  return device.telemetry ?? device.last_telemetry ?? null;
}

export function served(device: Device): Served[] {
  const differences = new Map((device.differences ?? []).map((one) => [bare(one.model), one]));
  const windows = new Map((told(device)?.models ?? []).map((one) => [one.model, one]));
  const reported = device.models.map((one) => ({
    model: one.model,
    wanted: device.desired.find((wish) => wish.model === bare(one.model))?.release ?? "",
    running: one.release,
    state: one.last_state ?? one.state,
    cut: windows.get(one.model)?.row ?? "",
    why: why(differences.get(bare(one.model)), one.detail),
  }));
  const known = new Set(device.models.map((one) => bare(one.model)));
  const unheard = device.desired.filter((one) => !known.has(one.model));
  return [
    ...reported,
    ...unheard.map((one) => ({
      model: one.model,
      wanted: one.release,
      running: "",
      state: "assigned",
      cut: "",
      why: why(differences.get(one.model), "the device has not spoken of it"),
    })),
  ];
}

function why(difference: Difference | undefined, detail: string): string {
  if (difference === undefined || difference.kind === "as desired") return detail;
  return [difference.kind, difference.detail || detail].filter(Boolean).join(": ");
}

function bare(model: string): string {
  return model.split("@")[0] ?? model;
}
