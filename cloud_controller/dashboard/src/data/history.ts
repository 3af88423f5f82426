// Telemetry as lines over time, from a device's reports or from buckets of time, with gaps where data is missing. Pure.

import type { Bucket, Telemetry, Window } from "./types";

export interface History {
  at: number[];
  p95: (number | null)[];
  worst: (number | null)[];
  device: (number | null)[];
  link: (number | null)[];
  remote: (number | null)[];
  predicted: (number | null)[];
  requests: (number | null)[];
  fallbacks: (number | null)[];
  failed: (number | null)[];
  joules: (number | null)[];
  uplink: (number | null)[];
  roundTrip: (number | null)[];
  watts: (number | null)[];
  celsius: (number | null)[];
  /** Of the requests of a cascade, in per cent: surely answered by its first variant, by its second one, and unsurely. */
  sure: (number | null)[];
  escalated: (number | null)[];
  unsure: (number | null)[];
  /** Answers that a cascade changed, in per cent: allowed, measured by audits so far, and between which shares it lies. */
  allowed: (number | null)[];
  changed: (number | null)[];
  changedLeast: (number | null)[];
  changedMost: (number | null)[];
  /** The same of repeated answers. */
  stillAllowed: (number | null)[];
  stillChanged: (number | null)[];
  stillLeast: (number | null)[];
  stillMost: (number | null)[];
}

const LINES = [
  "p95", "worst", "device", "link", "remote", "predicted", "requests", "fallbacks", "failed", "joules", "uplink", "roundTrip", "watts", "celsius",
  "sure", "escalated", "unsure", "allowed", "changed", "changedLeast", "changedMost", "stillAllowed", "stillChanged", "stillLeast", "stillMost",
] as const; // biome-ignore format: one line
type Point = Partial<Record<(typeof LINES)[number], number | null | undefined>>;

/** A pause of so many usual pauses between reports is a gap. */
const GAP = 4;
/** The same of buckets: one that is missing is a gap; months differ in length. */
const BUCKET_GAP = 1.5;

export interface Range {
  name: string;
  span: "minute" | "hour" | "day" | "month";
  /** What one point is. */
  per: string;
}

/** Time ranges with the span of their buckets, each as long as the controller returns by default. */
export const RANGES: readonly Range[] = [
  { name: "1 h", span: "minute", per: "minute" },
  { name: "24 h", span: "hour", per: "hour" },
  { name: "30 d", span: "day", per: "day" },
  { name: "12 months", span: "month", per: "month" },
];

export function fromReports(reports: readonly Telemetry[], model: string): History {
  const points = [...reports]
    .sort((a, b) => a.at - b.at)
    .map((report): [number, Point] => {
      const window = report.models.find((each) => each.model === model);
      return [report.at, { ...ofWindow(window), ...ofDevice(report) }];
    });
  const usual = usualPause(points.map(([at]) => at));
  return lines(points, usual, GAP * usual);
}

/** Buckets of one model, and of the device that it ran on, where it is one device's. */
export function fromBuckets(model: readonly Bucket[], device: readonly Bucket[] = []): History {
  const own = new Map(device.map((bucket) => [bucket.at, bucket]));
  const ofModel = new Map(model.map((bucket) => [bucket.at, bucket]));
  const times = [...new Set([...own.keys(), ...ofModel.keys()])].sort((a, b) => a - b);
  const span = [...model, ...device][0]?.span_s ?? 0;
  const points = times.map((at): [number, Point] => [
    at,
    { ...ofBucket(ofModel.get(at)), ...ofDeviceBucket(own.get(at)) },
  ]);
  return lines(points, span, BUCKET_GAP * span);
}

/** The models of these reports, the one with the most requests first. */
export function modelsOf(reports: readonly Telemetry[]): string[] {
  const requests = new Map<string, number>();
  for (const window of reports.flatMap((report) => report.models))
    requests.set(window.model, (requests.get(window.model) ?? 0) + window.requests);
  return [...requests].sort(([a, many], [b, more]) => more - many || (a < b ? -1 : 1)).map(([model]) => model);
}

/** The range to begin with: in the first hours of what began at `since` hours and days are single points. */
export function firstRange(since: number, now: number): Range {
  const [hour, day] = RANGES as [Range, Range];
  return now - since < 7_200 ? hour : day;
}

/** Requests by the origin of their answers (`real`, `emulated`, `simulated`), over all of these buckets. */
export function origins(buckets: readonly Bucket[]): Record<string, number> {
  const sums: Record<string, number> = {};
  for (const bucket of buckets)
    for (const [kind, count] of Object.entries(bucket.origins ?? {})) sums[kind] = (sums[kind] ?? 0) + count;
  return sums;
}

function ofWindow(window: Window | undefined): Point {
  if (window === undefined) return {};
  const counts = { requests: window.requests, fallbacks: window.fallbacks, failed: window.failed };
  if (window.requests === 0) return counts;
  return {
    ...counts,
    p95: window.latency_p95_s,
    device: window.device_s,
    link: window.link_s,
    remote: window.remote_s,
    predicted: window.predicted_s,
    joules: window.joules_basis ? window.joules : null,
  };
}

function ofDevice(report: Telemetry): Point {
  return {
    uplink: positive(report.up_bytes_per_s),
    roundTrip: positive(report.rtt_s),
    watts: report.power?.watts,
    celsius: report.power?.celsius,
  };
}

function ofBucket(bucket: Bucket | undefined): Point {
  if (bucket === undefined) return {};
  const counts = {
    requests: bucket.requests,
    fallbacks: bucket.fallbacks,
    failed: bucket.failed,
    ...ofCascade(bucket),
    ...ofStill(bucket),
  };
  if (!bucket.requests) return counts;
  return {
    ...counts,
    p95: bucket.latency_p95_s,
    worst: bucket.latency_p95_worst_s,
    device: bucket.device_s,
    link: bucket.link_s,
    remote: bucket.remote_s,
    predicted: bucket.predicted_s,
    joules: bucket.joules,
  };
}

function ofCascade({ cascade, cascade_allowed_max, cascade_measured }: Bucket): Point {
  if (cascade === undefined) return {};
  const asked = cascade.sure + cascade.escalated + cascade.unsure;
  const share = (count: number) => (asked > 0 ? (100 * count) / asked : null);
  return {
    sure: share(cascade.sure),
    escalated: share(cascade.escalated),
    unsure: share(cascade.unsure),
    allowed: perCent(cascade_allowed_max),
    changed: perCent(cascade_measured?.share),
    changedLeast: perCent(cascade_measured?.at_least),
    changedMost: perCent(cascade_measured?.at_most),
  };
}

function ofStill({ still, still_allowed_max, still_measured }: Bucket): Point {
  if (still === undefined) return {};
  return {
    stillAllowed: perCent(still_allowed_max),
    stillChanged: perCent(still_measured?.share),
    stillLeast: perCent(still_measured?.at_least),
    stillMost: perCent(still_measured?.at_most),
  };
}

function perCent(share: number | null | undefined): number | null {
  return share === null || share === undefined ? null : 100 * share;
}

function ofDeviceBucket(bucket: Bucket | undefined): Point {
  return bucket === undefined
    ? {}
    : {
        uplink: positive(bucket.up_bytes_per_s),
        roundTrip: positive(bucket.rtt_s),
        watts: bucket.watts,
        celsius: bucket.celsius_max,
      };
}

function positive(value: number | null | undefined): number | null {
  return value !== null && value !== undefined && value > 0 ? value : null;
}

/** Points as lines, with a gap after each pause of more than `longest` seconds, where the next point was due. */
function lines(points: readonly (readonly [number, Point])[], usual: number, longest: number): History {
  const history = empty();
  let last: number | null = null;
  for (const [at, point] of points) {
    if (last !== null && at - last > longest) add(history, last + usual, {});
    add(history, at, point);
    last = at;
  }
  return history;
}

function add(history: History, at: number, point: Point): void {
  history.at.push(at);
  for (const line of LINES) history[line].push(point[line] ?? null);
}

function empty(): History {
  const none = Object.fromEntries(LINES.map((line) => [line, []])) as unknown as Omit<History, "at">;
  return { at: [], ...none };
}

function usualPause(times: readonly number[]): number {
  const pauses = times.slice(1).map((at, place) => at - (times[place] ?? at));
  const ordered = pauses.filter((pause) => pause > 0).sort((a, b) => a - b);
  return ordered[Math.floor(ordered.length / 2)] ?? 10;
}

/** Cumulative sums for a stacked chart: each line on those below it. */
export function stacked(...parts: (number | null)[][]): (number | null)[][] {
  const first = parts[0] ?? [];
  const sums = first.map(() => 0);
  return parts.map((line) =>
    line.map((value, place) => {
      if (value === null) return null;
      sums[place] = (sums[place] ?? 0) + value;
      return sums[place] ?? null;
    }),
  );
}
