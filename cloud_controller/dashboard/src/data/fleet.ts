// The fleet: fetched whole once, then only the devices that changed.

import { useEffect } from "preact/hooks";
import { get, Unreachable } from "./api";
import { Cell, useCell } from "./cell";
import { EVERYTHING, onChanges, type Subject } from "./live";
import type { Fleet, FleetRow } from "./types";

export interface FleetState {
  rows: readonly FleetRow[];
  loaded: boolean;
  releases: Record<string, string>;
  error: Error | null;
}

/** More changes than this are read as a whole. */
const SEVERAL = 100;
const REST_MS = 1_500;

const fleet = new Cell<FleetState>({ rows: [], loaded: false, releases: {}, error: null });
const waiting = new Set<string>();
let everything = false;
let timer: ReturnType<typeof setTimeout> | undefined;
let watching = 0;

export function useFleet(): FleetState {
  useEffect(() => {
    if (watching++ === 0) void readAll();
    const stop = onChanges(note);
    return () => {
      stop();
      watching--;
    };
  }, []);
  return useCell(fleet);
}

export function readFleetAgain(): void {
  void readAll();
}

export function forgetFleet(): void {
  fleet.value = { rows: [], loaded: false, releases: {}, error: null };
}

function note(changes: readonly Subject[]): void {
  for (const { kind, subject } of changes) {
    if (kind === EVERYTHING || kind === "rollout") everything = true;
    else if (kind === "device" || kind === "alert") waiting.add(subject);
  }
  if ((everything || waiting.size > 0) && timer === undefined) timer = setTimeout(() => void catchUp(), REST_MS);
}

async function catchUp(): Promise<void> {
  const names = [...waiting];
  const all = everything || names.length > SEVERAL;
  waiting.clear();
  everything = false;
  const began = performance.now();
  await (all ? readAll() : readSome(names));
  // A large fleet takes long to read: at most a fifth of the time goes into it.
  const rest = Math.max(REST_MS, 4 * (performance.now() - began));
  timer = undefined;
  if (everything || waiting.size > 0) timer = setTimeout(() => void catchUp(), rest);
}

async function readAll(): Promise<void> {
  await reading(async () => {
    const answer = await get<Fleet>("/v1/views/fleet");
    fleet.value = { rows: answer.devices, loaded: true, releases: answer.releases, error: null };
  });
}

async function readSome(names: string[]): Promise<void> {
  await reading(async () => {
    const query = names.map((name) => `name=${encodeURIComponent(name)}`).join("&");
    const answer = await get<Fleet>(`/v1/views/fleet?${query}`);
    fleet.value = {
      ...fleet.value,
      rows: merged(fleet.value.rows, names, answer.devices),
      releases: answer.releases,
      error: null,
    };
  });
}

async function reading(read: () => Promise<void>): Promise<void> {
  try {
    await read();
  } catch (error) {
    fleet.value = { ...fleet.value, error: error instanceof Error ? error : new Unreachable(String(error)) };
  }
}

/** The rows with those of `names` replaced by the received ones; a device that was not received is gone. */
export function merged(rows: readonly FleetRow[], names: readonly string[], received: readonly FleetRow[]): FleetRow[] {
  const requested = new Set(names);
  const others = rows.filter((row) => !requested.has(row.name));
  return [...others, ...received].sort((a, b) => (a.name < b.name ? -1 : a.name > b.name ? 1 : 0));
}
