// What a fleet comes to: counts by state, release, cut and cause. Pure functions of its rows.

import type { FleetModel, FleetRow, State } from "./types";

export const STATES: readonly State[] = ["online", "stale", "offline", "claimed", "revoked"];

export interface Tally {
  key: string;
  count: number;
}

export interface ReleaseTally {
  model: string;
  release: string;
  running: number;
  coming: number;
}

export function byState(rows: readonly FleetRow[]): Record<State, number> {
  const counts: Record<State, number> = { online: 0, stale: 0, offline: 0, claimed: 0, revoked: 0 };
  for (const row of rows) counts[row.state]++;
  return counts;
}

export function byRelease(rows: readonly FleetRow[]): ReleaseTally[] {
  const tallies = new Map<string, ReleaseTally>();
  const tally = (model: string, release: string): ReleaseTally => {
    const name = model.split("@")[0] ?? model;
    const key = `${name} ${release}`;
    const known = tallies.get(key) ?? { model, release, running: 0, coming: 0 };
    if (model.includes("@")) known.model = model;
    tallies.set(key, known);
    return known;
  };
  for (const row of rows) {
    for (const model of row.models) {
      if (model.release !== "") tally(model.model, model.release).running++;
      if (model.desired_release !== "" && model.desired_release !== model.release)
        tally(model.model, model.desired_release).coming++;
    }
  }
  return [...tallies.values()].sort((a, b) => b.running + b.coming - (a.running + a.coming));
}

/** Cuts in use by model, of devices that are online: the last reports of the others are not current. */
export function byCut(rows: readonly FleetRow[]): Tally[] {
  return tallied(rows.filter((row) => row.state === "online").flatMap((row) => row.models.map(cutOf)));
}

/** A model's cut, as in `people cut-6`: `cut-6` of another model is another cut. Empty where none was reported. */
export function cutOf(model: FleetModel): string {
  return model.row === "" ? "" : `${model.model.split("@")[0]} ${model.row}`;
}

export function byCause(rows: readonly FleetRow[]): Tally[] {
  return tallied(rows.flatMap((row) => [...new Set(row.causes.map(({ cause }) => cause))]));
}

export interface Traffic {
  requests: number;
  failed: number;
  fallbacks: number;
  medianP95: number | null;
  reporting: number;
}

/** Of the newest report of each device that is online. */
export function traffic(rows: readonly FleetRow[]): Traffic {
  const online = rows.filter((row) => row.state === "online");
  const busy = online.filter((row) => row.requests > 0);
  const sum = (part: (row: FleetRow) => number) => online.reduce((total, row) => total + part(row), 0);
  const p95s = busy.flatMap((row) => (row.p95_s === null ? [] : [row.p95_s])).sort((a, b) => a - b);
  return {
    requests: sum((row) => row.requests),
    failed: sum((row) => row.failed),
    fallbacks: sum((row) => row.fallbacks),
    medianP95: p95s[Math.floor(p95s.length / 2)] ?? null,
    reporting: busy.length,
  };
}

export type Column = "state" | "name" | "group" | "class" | "cut" | "p95" | "fallbacks" | "failed" | "seen";

/** A copy in the order of a column; equal rows by name. */
export function sorted(rows: readonly FleetRow[], column: Column, downwards: boolean): readonly FleetRow[] {
  if (column === "name" && !downwards) return rows;
  const key = KEYS[column];
  const sign = downwards ? -1 : 1;
  return [...rows].sort((a, b) => {
    const [first, second] = [key(a), key(b)];
    return first < second ? -sign : first > second ? sign : a.name < b.name ? -1 : 1;
  });
}

const KEYS: Record<Column, (row: FleetRow) => number | string> = {
  state: (row) => STATES.indexOf(row.state),
  name: (row) => row.name,
  group: (row) => row.group,
  class: (row) => row.class,
  cut: (row) => row.models[0]?.row ?? "",
  p95: (row) => row.p95_s ?? -1,
  fallbacks: (row) => row.fallbacks,
  failed: (row) => row.failed,
  seen: (row) => row.last_seen ?? 0,
};

function tallied(keys: readonly string[]): Tally[] {
  const counts = new Map<string, number>();
  for (const key of keys) if (key !== "") counts.set(key, (counts.get(key) ?? 0) + 1);
  return [...counts]
    .map(([key, count]) => ({ key, count }))
    .sort((a, b) => b.count - a.count || (a.key < b.key ? -1 : 1));
}
