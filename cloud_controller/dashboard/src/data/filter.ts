// What an operator types to narrow the fleet: words and `key=value`, all of which must hold.

import type { FleetRow } from "./types";

const KEYS: Record<string, (row: FleetRow) => string[]> = {
  state: (row) => [row.state],
  group: (row) => [row.group],
  class: (row) => [row.class],
  cut: (row) => row.models.map((one) => one.row),
  model: (row) => row.models.flatMap((one) => [one.model, one.model.split("@")[0] ?? ""]),
  release: (row) => row.models.map((one) => one.release),
  cause: (row) => row.causes.map((one) => one.cause),
  is: marks,
};

/** Words in any order; a value with spaces stands in double quotes. */
export function words(text: string): string[] {
  return [...text.matchAll(/[^\s"=]*=?"[^"]*"|\S+/g)].map((found) => found[0].replaceAll('"', ""));
}

export function matches(row: FleetRow, text: string): boolean {
  return words(text).every((word) => holds(row, word));
}

export function narrowed(rows: readonly FleetRow[], text: string): readonly FleetRow[] {
  const wanted = words(text);
  return wanted.length === 0 ? rows : rows.filter((row) => wanted.every((word) => holds(row, word)));
}

/** The filter with `key=value` in it, or without it where it was there already. */
export function toggled(text: string, key: string, value: string): string {
  const word = `${key}=${value}`;
  const there = words(text);
  const kept = there.includes(word) ? there.filter((one) => one !== word) : [...there, word];
  return kept.map(spelt).join(" ");
}

export function has(text: string, key: string, value: string): boolean {
  return words(text).includes(`${key}=${value}`);
}

function spelt(word: string): string {
  const equals = word.indexOf("=");
  return word.includes(" ") && equals > 0 ? `${word.slice(0, equals)}="${word.slice(equals + 1)}"` : word;
}

function holds(row: FleetRow, word: string): boolean {
  const equals = word.indexOf("=");
  if (equals <= 0) {
    const part = word.toLowerCase();
    return [row.name, row.group, row.class, ...Object.values(row.labels)].some((one) =>
      one.toLowerCase().includes(part),
    );
  }
  const key = word.slice(0, equals);
  const value = word.slice(equals + 1);
  const known = Object.hasOwn(KEYS, key) ? KEYS[key] : undefined;
  if (known === undefined) return row.labels[key] === value;
  return known(row).some((one) => one === value || (key === "release" && value !== "" && one.startsWith(value)));
}

function marks(row: FleetRow): string[] {
  const found: string[] = [];
  if (row.emulated) found.push("emulated");
  if (row.simulated) found.push("simulated");
  if (row.causes.length > 0) found.push("troubled");
  if (row.fallbacks > 0) found.push("falling-back");
  if (row.models.some((one) => one.release !== one.desired_release)) found.push("behind");
  return found;
}
