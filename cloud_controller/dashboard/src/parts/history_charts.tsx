// Measurements over time, several pictures of one history: of a device as it tells it, or added up by spans of time.

import type { ComponentChildren } from "preact";
import { type History, RANGES, type Range, stacked } from "../data/history";
import { count, figure, NONE, rate, seconds } from "../format";
import { Chart } from "./chart";
import { Panel } from "./notes";

interface Props {
  made: History;
  note: ComponentChildren;
}

const TIME = { format: (value: number) => String(value), time: true };

/** What is shown: the newest reports (no range), or a range that the controller has added up. */
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
      <legend class="hidden">How far back</legend>
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

export function LatencyChart({ made, note }: Props) {
  const [device = [], link = [], remote = []] = stacked(made.device, made.link, made.remote);
  const of = (line: (number | null)[]) => (index: number) => seconds(line[index]);
  const worst = made.worst.some((value) => value !== null);
  return (
    <Panel title="Latency" note={note}>
      <Chart
        label={`Seconds per request over time, split into device, link and remote. Newest: ${newest(made)}`}
        x={made.at}
        xAxis={TIME}
        yAxis={{ format: seconds }}
        lines={[
          { label: "remote", colour: "remote", values: remote, told: of(made.remote), filled: true, width: 1 },
          { label: "link", colour: "link", values: link, told: of(made.link), filled: true, width: 1 },
          { label: "device", colour: "device", values: device, told: of(made.device), filled: true, width: 1 },
          { label: "p95", colour: "ink", values: made.p95, width: 1.25, dashed: true },
          ...(worst ? [{ label: "worst p95", colour: "faint" as const, values: made.worst, width: 1 }] : []),
        ]}
      />
    </Panel>
  );
}

export function BandwidthChart({ made, note }: Props) {
  return (
    <Panel title="Link" note={note}>
      <Chart
        label={`Uplink and round trip over time. Newest: ${rate(made.uplink.at(-1))}, ${seconds(made.roundTrip.at(-1))}`}
        x={made.at}
        xAxis={TIME}
        yAxis={{ format: rate, least: 0 }}
        rightAxis={{ format: seconds, least: 0 }}
        lines={[
          { label: "uplink", colour: "link", values: made.uplink, width: 1.75 },
          { label: "round trip", colour: "faint", values: made.roundTrip, scale: "right", dashed: true },
        ]}
      />
    </Panel>
  );
}

export function RequestsChart({ made, note, per = "report" }: Props & { per?: string }) {
  return (
    <Panel title={`Requests per ${per}`} note={note}>
      <Chart
        label={`Requests, fallbacks and failures per ${per}. Newest: ${made.requests.at(-1) ?? NONE} requests`}
        x={made.at}
        xAxis={TIME}
        yAxis={{ format: (value) => count(Math.round(value)), least: 0 }}
        lines={[
          { label: "requests", colour: "faint", values: made.requests, filled: true, width: 1 },
          { label: "fallbacks", colour: "link", values: made.fallbacks, width: 1.75 },
          { label: "failed", colour: "warn", values: made.failed, width: 1.75, dashed: true },
        ]}
      />
    </Panel>
  );
}

export function PowerChart({ made, note }: Props) {
  const known = [...made.watts, ...made.celsius].some((value) => value !== null);
  return (
    <Panel title="Power and temperature" note={note}>
      {known ? (
        <Chart
          label={`Watts and degrees over time. Newest: ${made.watts.at(-1) ?? NONE} W, ${made.celsius.at(-1) ?? NONE} °C`}
          x={made.at}
          xAxis={TIME}
          yAxis={{ format: (value) => `${figure(value)} W`, least: 0 }}
          rightAxis={{ format: (value) => `${figure(value)} °C`, around: 8 }}
          lines={[
            { label: "power", colour: "cut2", values: made.watts, width: 1.75 },
            { label: "temperature", colour: "warn", values: made.celsius, scale: "right", dashed: true },
          ]}
        />
      ) : (
        <p class="none">No sensor tells power or temperature.</p>
      )}
    </Panel>
  );
}

export function EnergyChart({ made, note }: Props) {
  if (!made.joules.some((value) => value !== null)) return null;
  return (
    <Panel title="Energy per request" note={note}>
      <Chart
        label={`Joules per request on the device. Newest: ${figure(made.joules.at(-1) ?? Number.NaN)} J`}
        x={made.at}
        xAxis={TIME}
        yAxis={{ format: (value) => `${figure(value)} J`, least: 0 }}
        lines={[{ label: "energy", colour: "cut3", values: made.joules, width: 1.75 }]}
      />
    </Panel>
  );
}

function newest(made: History): string {
  const parts = [made.device, made.link, made.remote].map((line) => seconds(line.at(-1)));
  return `device ${parts[0]}, link ${parts[1]}, remote ${parts[2]}`;
}
