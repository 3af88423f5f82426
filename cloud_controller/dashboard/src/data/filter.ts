// The filter of the fleet: words and `key=value`, all of which must match.

import { cutOf } from "./summary";
import type { FleetRow } from "./types";

const KEYS: Record<string, (row: FleetRow) => string[]> = {
  state: (row) => [row.state],
  group: (row) => [row.group],
  class: (row) => [row.class],
  cut: (row) => row.models.flatMap((model) => [model.row, cutOf(model)]),
  model: (row) => row.models.flatMap(({ model }) => [model, model.split("@")[0] ?? ""]),
  release: (row) => row.models.map((model) => model.release),
  cause: (row) => row.causes.map(({ cause }) => cause),
  is: marks,
};

/** The words of a filter, in any order; a value with spaces is in double quotes. */
export function words(text: string): string[] {
  return [...text.matchAll(/[^\s"=]*=?"[^"]*"|\S+/g)].map((match) => match[0].replaceAll('"', ""));
}

export function matches(row: FleetRow, text: string): boolean {
  return words(text).every((word) => holds(row, word));
}

export function narrowed(rows: readonly FleetRow[], text: string): readonly FleetRow[] {
  const wanted = words(text);
  return wanted.length === 0 ? rows : rows.filter((row) => wanted.every((word) => holds(row, word)));
}

/** The filter with `key=value` added, or removed where it is there already. */
export function toggled(text: string, key: string, value: string): string {
  const word = `${key}=${value}`;
  const current = words(text);
  const next = current.includes(word) ? current.filter((other) => other !== word) : [...current, word];
  return next.map(quoted).join(" ");
}

export function has(text: string, key: string, value: string): boolean {
  return words(text).includes(`${key}=${value}`);
}

function quoted(word: string): string {
  const equals = word.indexOf("=");
  return word.includes(" ") && equals > 0 ? `${word.slice(0, equals)}="${word.slice(equals + 1)}"` : word;
}

function holds(row: FleetRow, word: string): boolean {
  const equals = word.indexOf("=");
  if (equals <= 0) {
    const part = word.toLowerCase();
    return [row.name, row.group, row.class, ...Object.values(row.labels)].some((text) =>
      text.toLowerCase().includes(part),
    );
  }
  const key = word.slice(0, equals);
  const value = word.slice(equals + 1);
  const known = Object.hasOwn(KEYS, key) ? KEYS[key] : undefined;
  if (known === undefined) return row.labels[key] === value;
  return known(row).some((own) => own === value || (key === "release" && value !== "" && own.startsWith(value)));
}

function marks(row: FleetRow): string[] {
  const set: string[] = [];
  if (row.emulated) set.push("emulated");
  if (row.simulated) set.push("simulated");
  if (row.causes.length > 0) set.push("degraded");
  if (row.fallbacks > 0) set.push("falling-back");
  if (row.models.some((model) => model.release !== model.desired_release)) set.push("outdated");
  return set;
}
