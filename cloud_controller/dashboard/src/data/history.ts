// Telemetry as lines over time. Pure: what a device told, in its order, with holes where it was silent.

import type { Telemetry, Window } from "./types";

export interface History {
  at: number[];
  p95: (number | null)[];
  device: (number | null)[];
  link: (number | null)[];
  remote: (number | null)[];
  predicted: (number | null)[];
  requests: (number | null)[];
  fallbacks: (number | null)[];
  failed: (number | null)[];
  uplink: (number | null)[];
  roundTrip: (number | null)[];
  watts: (number | null)[];
  celsius: (number | null)[];
}

const LINES = [
  "p95", "device", "link", "remote", "predicted", "requests", "fallbacks", "failed", "uplink", "roundTrip", "watts", "celsius",
] as const; // biome-ignore format: one line

/** A silence of so many usual pauses is a hole. */
const HOLE = 4;

export function history(told: readonly Telemetry[], model: string): History {
  const made = empty();
  const usual = usualPause(told);
  let last: number | null = null;
  for (const one of [...told].sort((a, b) => a.at - b.at)) {
    if (last !== null && one.at - last > HOLE * usual) hole(made, last + usual);
    add(
      made,
      one,
      one.models.find((window) => window.model === model),
    );
    last = one.at;
  }
  return made;
}

export function modelsOf(told: readonly Telemetry[]): string[] {
  const newest = told.at(-1);
  const names = newest === undefined ? [] : newest.models.map((window) => window.model);
  return names.length > 0 ? names : [...new Set(told.flatMap((one) => one.models.map((window) => window.model)))];
}

function add(made: History, told: Telemetry, window: Window | undefined): void {
  const busy = window !== undefined && window.requests > 0 ? window : undefined;
  made.at.push(told.at);
  made.p95.push(busy?.latency_p95_s ?? null);
  made.device.push(busy?.device_s ?? null);
  made.link.push(busy?.link_s ?? null);
  made.remote.push(busy?.remote_s ?? null);
  made.predicted.push(busy?.predicted_s ?? null);
  made.requests.push(window?.requests ?? null);
  made.fallbacks.push(window?.fallbacks ?? null);
  made.failed.push(window?.failed ?? null);
  made.uplink.push(told.up_bytes_per_s > 0 ? told.up_bytes_per_s : null);
  made.roundTrip.push(told.rtt_s > 0 ? told.rtt_s : null);
  made.watts.push(told.power?.watts ?? null);
  made.celsius.push(told.power?.celsius ?? null);
}

function hole(made: History, at: number): void {
  made.at.push(at);
  for (const line of LINES) made[line].push(null);
}

function empty(): History {
  const lines = Object.fromEntries(LINES.map((line) => [line, []])) as unknown as Omit<History, "at">;
  return { at: [], ...lines };
}

function usualPause(told: readonly Telemetry[]): number {
  const pauses = told.slice(1).map((one, place) => one.at - (told[place]?.at ?? one.at));
  const ordered = pauses.filter((pause) => pause > 0).sort((a, b) => a - b);
  return ordered[Math.floor(ordered.length / 2)] ?? 10;
}

/** Sums for a stacked picture: each line on those below it. */
export function stacked(...lines: (number | null)[][]): (number | null)[][] {
  const first = lines[0] ?? [];
  const sums = first.map(() => 0);
  return lines.map((line) =>
    line.map((value, place) => {
      if (value === null) return null;
      sums[place] = (sums[place] ?? 0) + value;
      return sums[place] ?? null;
    }),
  );
}
