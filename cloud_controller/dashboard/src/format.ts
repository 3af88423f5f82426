// Figures as text, each with its unit; an unknown value is an en dash, never zero.

export const NONE = "–";

/** Three significant digits, without an exponent. */
export function figure(value: number): string {
  if (!Number.isFinite(value)) return NONE;
  if (value === 0) return "0";
  const digits = Math.max(0, Math.min(3, 2 - Math.floor(Math.log10(Math.abs(value)))));
  const text = value.toFixed(digits);
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

export function seconds(value: number | null | undefined): string {
  if (value === null || value === undefined) return NONE;
  if (value !== 0 && Math.abs(value) < 0.001) return `${figure(value * 1e6)} µs`;
  return Math.abs(value) < 1 ? `${figure(value * 1e3)} ms` : `${figure(value)} s`;
}

/** Bytes per second as Mbit/s, the unit of links everywhere. */
export function rate(bytesPerSecond: number | null | undefined): string {
  if (bytesPerSecond === null || bytesPerSecond === undefined) return NONE;
  const mbit = bytesPerSecond * 8e-6;
  return mbit < 999.5 ? `${figure(mbit)} Mbit/s` : `${figure(mbit / 1000)} Gbit/s`;
}

export function bytes(value: number | null | undefined): string {
  if (value === null || value === undefined) return NONE;
  if (value < 1000) return `${value} B`;
  if (value < 1e6) return `${figure(value / 1e3)} kB`;
  return value < 1e9 ? `${figure(value / 1e6)} MB` : `${figure(value / 1e9)} GB`;
}

/** Time since a moment, in a single unit. */
export function age(at: number | null | undefined, now: number): string {
  if (at === null || at === undefined) return NONE;
  const passed = Math.max(0, now - at);
  if (passed < 60) return `${Math.floor(passed)} s`;
  if (passed < 3600) return `${Math.floor(passed / 60)} min`;
  return passed < 2 * 86400 ? `${Math.floor(passed / 3600)} h` : `${Math.floor(passed / 86400)} d`;
}

export function percent(part: number, whole: number): string {
  if (whole <= 0) return NONE;
  const share = (100 * part) / whole;
  if (part > 0 && share < 0.1) return "<0.1 %";
  return `${share < 10 ? figure(Math.round(share * 10) / 10) : Math.round(share)} %`;
}

export function count(value: number): string {
  return value.toLocaleString("en-GB").replaceAll(",", " ");
}

export function times(factor: number | null | undefined): string {
  return factor === null || factor === undefined ? NONE : `${figure(factor)} ×`;
}

/** The moment in the reader's own time zone, sortable by eye. */
export function moment(at: number | null | undefined): string {
  if (at === null || at === undefined || at === 0) return NONE;
  const date = new Date(at * 1000);
  const two = (value: number) => String(value).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/** The first characters of a digest, enough to distinguish releases. */
export function short(digest: string): string {
  return digest.length > 12 ? digest.slice(0, 8) : digest;
}

/** The name of a row of a plan, as commands and metrics have it, and what it does. */
export function cutName(row: { name: string; split_after: string; local: boolean }): string {
  if (row.local) return `${row.name}: all on the device`;
  return row.split_after === "" ? `${row.name}: all beyond the link` : `${row.name}: after ${row.split_after}`;
}

export function plural(number: number, singular: string, several = `${singular}s`): string {
  return `${count(number)} ${number === 1 ? singular : several}`;
}
