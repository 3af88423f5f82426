// Charts of measurements over time: of a device's reports, or of sums by minute, hour, day or month.

import type { ComponentChildren } from "preact";
import { type History, RANGES, type Range, stacked } from "../data/history";
import { count, figure, NONE, percent, rate, seconds } from "../format";
import { Chart } from "./chart";
import { Panel } from "./notes";

interface Props {
  history: History;
  note: ComponentChildren;
}

const TIME = { format: (value: number) => String(value), time: true };

/** Choice of what is shown: the newest reports (no range), or a range of the controller's history. */
export function Ranges({
  chosen,
  onChoose,
  live = false,
}: {
  chosen: Range | null;
  onChoose: (range: Range | null) => void;
  live?: boolean;
}) {
  const offered: (Range | null)[] = live ? [null, ...RANGES] : [...RANGES];
  return (
    <fieldset class="ranges">
      <legend class="hidden">Time range</legend>
      {offered.map((range) => (
        <button
          key={range?.name ?? "live"}
          type="button"
          aria-pressed={chosen === range}
          onClick={() => onChoose(range)}
        >
          {range?.name ?? "newest reports"}
        </button>
      ))}
    </fieldset>
  );
}

export function LatencyChart({ history, note }: Props) {
  const [device = [], link = [], remote = []] = stacked(history.device, history.link, history.remote);
  const of = (line: (number | null)[]) => (index: number) => seconds(line[index]);
  const worst = history.worst.some((value) => value !== null);
  return (
    <Panel title="Latency" note={note}>
      <Chart
        label={`Seconds per request over time, split into device, link and remote. Newest: ${newest(history)}`}
        x={history.at}
        xAxis={TIME}
        yAxis={{ format: seconds }}
        lines={[
          { label: "remote", colour: "remote", values: remote, tooltip: of(history.remote), filled: true, width: 1 },
          { label: "link", colour: "link", values: link, tooltip: of(history.link), filled: true, width: 1 },
          { label: "device", colour: "device", values: device, tooltip: of(history.device), filled: true, width: 1 },
          { label: "p95", colour: "ink", values: history.p95, width: 1.25, dashed: true },
          ...(worst ? [{ label: "worst p95", colour: "faint" as const, values: history.worst, width: 1 }] : []),
        ]}
      />
    </Panel>
  );
}

export function BandwidthChart({ history, note }: Props) {
  return (
    <Panel title="Link" note={note}>
      <Chart
        label={`Uplink and round trip over time. Newest: ${rate(history.uplink.at(-1))}, ${seconds(history.roundTrip.at(-1))}`}
        x={history.at}
        xAxis={TIME}
        yAxis={{ format: rate, least: 0 }}
        rightAxis={{ format: seconds, least: 0 }}
        lines={[
          { label: "uplink", colour: "link", values: history.uplink, width: 1.75 },
          { label: "round trip", colour: "faint", values: history.roundTrip, scale: "right", dashed: true },
        ]}
      />
    </Panel>
  );
}

export function RequestsChart({ history, note, per = "report" }: Props & { per?: string }) {
  return (
    <Panel title={`Requests per ${per}`} note={note}>
      <Chart
        label={`Requests, fallbacks and failures per ${per}. Newest: ${history.requests.at(-1) ?? NONE} requests`}
        x={history.at}
        xAxis={TIME}
        yAxis={{ format: count, least: 0, whole: true }}
        lines={[
          { label: "requests", colour: "faint", values: history.requests, filled: true, width: 1 },
          { label: "fallbacks", colour: "link", values: history.fallbacks, width: 1.75 },
          { label: "failed", colour: "warn", values: history.failed, width: 1.75, dashed: true },
        ]}
      />
    </Panel>
  );
}

export function PowerChart({ history, note }: Props) {
  const known = [...history.watts, ...history.celsius].some((value) => value !== null);
  return (
    <Panel title="Power and temperature" note={note}>
      {known ? (
        <Chart
          label={`Watts and degrees over time. Newest: ${history.watts.at(-1) ?? NONE} W, ${history.celsius.at(-1) ?? NONE} °C`}
          x={history.at}
          xAxis={TIME}
          yAxis={{ format: (value) => `${figure(value)} W`, least: 0 }}
          rightAxis={{ format: (value) => `${figure(value)} °C`, around: 8 }}
          lines={[
            { label: "power", colour: "cut2", values: history.watts, width: 1.75 },
            { label: "temperature", colour: "warn", values: history.celsius, scale: "right", dashed: true },
          ]}
        />
      ) : (
        <p class="none">No sensor reports power or temperature.</p>
      )}
    </Panel>
  );
}

export function EnergyChart({ history, note }: Props) {
  if (!history.joules.some((value) => value !== null)) return null;
  return (
    <Panel title="Energy per request" note={note}>
      <Chart
        label={`Joules per request on the device. Newest: ${figure(history.joules.at(-1) ?? Number.NaN)} J`}
        x={history.at}
        xAxis={TIME}
        yAxis={{ format: (value) => `${figure(value)} J`, least: 0 }}
        lines={[{ label: "energy", colour: "cut3", values: history.joules, width: 1.75 }]}
      />
    </Panel>
  );
}

/** Who answers in a cascade, in shares of its requests. */
export function CascadeChart({ history, note }: Props) {
  if (!known(history.sure)) return null;
  const [unsure = [], escalated = [], sure = []] = stacked(history.unsure, history.escalated, history.sure);
  const of = (line: (number | null)[]) => (index: number) => share(line[index]);
  return (
    <Panel title="Who answers" note={note}>
      <Chart
        label={`Requests of the cascade over time. Newest: ${share(history.sure.at(-1))} sure, ${share(history.escalated.at(-1))} escalated, ${share(history.unsure.at(-1))} unsure`}
        x={history.at}
        xAxis={TIME}
        yAxis={{ format: share, least: 0 }}
        {...restAt(history.at, history.sure)}
        lines={[
          { label: "sure", colour: "device", values: sure, tooltip: of(history.sure), filled: true, width: 1 },
          {
            label: "escalated",
            colour: "remote",
            values: escalated,
            tooltip: of(history.escalated),
            filled: true,
            width: 1,
          },
          { label: "unsure", colour: "warn", values: unsure, tooltip: of(history.unsure), filled: true, width: 1 },
        ]}
      />
    </Panel>
  );
}

/** What a cascade changes of the answers, as audits have shown since the beginning of the period, beside the promise. */
export function CascadeAuditsChart({ history, note }: Props) {
  const { allowed, changed, changedLeast, changedMost } = history;
  return (
    <AuditsChart
      title="Changed by the cascade"
      note={note}
      at={history.at}
      lines={{ allowed, changed, least: changedLeast, most: changedMost }}
    />
  );
}

/** The same of repeated answers. */
export function StillAuditsChart({ history, note }: Props) {
  const { stillAllowed, stillChanged, stillLeast, stillMost } = history;
  return (
    <AuditsChart
      title="Changed by repeating"
      note={note}
      at={history.at}
      lines={{ allowed: stillAllowed, changed: stillChanged, least: stillLeast, most: stillMost }}
    />
  );
}

function AuditsChart({
  title,
  note,
  at,
  lines,
}: {
  title: string;
  note: ComponentChildren;
  at: number[];
  lines: Record<"allowed" | "changed" | "least" | "most", (number | null)[]>;
}) {
  if (!known(lines.allowed)) return null;
  const last = (line: (number | null)[]) => line.findLast((value) => value !== null) ?? null;
  const newest = (line: (number | null)[]) => share(last(line));
  // the bounds of the first audits lie far above the promise, which is what is looked for
  const most = 1.2 * Math.max(3 * (last(lines.allowed) ?? 0), last(lines.most) ?? 0, last(lines.changed) ?? 0);
  return (
    <Panel title={title} note={note}>
      <Chart
        label={`Audited answers that differed, so far in this period. Newest: ${newest(lines.changed)}, between ${newest(lines.least)} and ${newest(lines.most)}; ${newest(lines.allowed)} allowed`}
        x={at}
        xAxis={TIME}
        yAxis={{ format: share, least: 0, most }}
        {...restAt(at, lines.allowed)}
        lines={[
          { label: "at most", colour: "faint", values: lines.most, width: 1 },
          { label: "measured", colour: "ink", values: lines.changed, width: 1.75 },
          { label: "at least", colour: "faint", values: lines.least, width: 1 },
          { label: "allowed", colour: "warn", values: lines.allowed, width: 1.75, dashed: true },
        ]}
      />
    </Panel>
  );
}

/** Without a pointer the legend shows the newest figures that there are. */
function restAt(at: readonly number[], line: readonly (number | null)[]): { rest?: number } {
  const rest = at[line.findLastIndex((value) => value !== null)];
  return rest === undefined ? {} : { rest };
}

function known(values: (number | null)[]): boolean {
  return values.some((value) => value !== null);
}

function share(value: number | null | undefined): string {
  return value === null || value === undefined ? NONE : percent(value, 100);
}

function newest(history: History): string {
  const parts = [history.device, history.link, history.remote].map((line) => seconds(line.at(-1)));
  return `device ${parts[0]}, link ${parts[1]}, remote ${parts[2]}`;
}
