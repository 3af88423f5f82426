// A device's measurements over time, four pictures of one history.

import type { ComponentChildren } from "preact";
import { type History, history, stacked } from "../data/history";
import type { Telemetry } from "../data/types";
import { count, figure, NONE, rate, seconds } from "../format";
import { Chart } from "./chart";
import { Panel } from "./notes";

interface Props {
  told: Telemetry[];
  model: string;
  note: ComponentChildren;
}

const TIME = { format: (value: number) => String(value), time: true };

export function LatencyChart({ told, model, note }: Props) {
  const made = history(told, model);
  const [device = [], link = [], remote = []] = stacked(made.device, made.link, made.remote);
  const of = (line: (number | null)[]) => (index: number) => seconds(line[index]);
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
        ]}
      />
    </Panel>
  );
}

export function BandwidthChart({ told, model, note }: Props) {
  const made = history(told, model);
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

export function RequestsChart({ told, model, note }: Props) {
  const made = history(told, model);
  return (
    <Panel title="Requests per report" note={note}>
      <Chart
        label={`Requests, fallbacks and failures per report. Newest: ${made.requests.at(-1) ?? NONE} requests`}
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

export function PowerChart({ told, model, note }: Props) {
  const made = history(told, model);
  const known = [...made.watts, ...made.celsius].some((value) => value !== null);
  return (
    <Panel title="Power and temperature" note={note}>
      {known ? (
        <Chart
          label={`Watts and degrees over time. Newest: ${told.at(-1)?.power?.watts ?? NONE} W, ${told.at(-1)?.power?.celsius ?? NONE} °C`}
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
        <p class="none">This device has no sensor that tells its power or temperature.</p>
      )}
    </Panel>
  );
}

function newest(made: History): string {
  const parts = [made.device, made.link, made.remote].map((line) => seconds(line.at(-1)));
  return `device ${parts[0]}, link ${parts[1]}, remote ${parts[2]}`;
}
