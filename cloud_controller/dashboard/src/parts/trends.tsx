// The fleet's last 24 hours in four small charts: devices that report, p95, fallbacks and requests.

import { fromBuckets } from "../data/history";
import { useResource } from "../data/resource";
import type { FleetTrend } from "../data/types";
import { count, percent, seconds } from "../format";
import { Chart, type Colour } from "./chart";
import { Panel } from "./notes";

const EVERY_S = 60;
const TIME = { format: (value: number) => String(value), time: true };

export function Trends() {
  const { data } = useResource<FleetTrend>("/v1/views/fleet/trend", () => false, EVERY_S);
  if (data === null) return null;
  const history = fromBuckets(data.buckets);
  if (history.at.length === 0) return null;
  const devices = new Map(data.buckets.map((bucket) => [bucket.at, bucket.devices]));
  const shares = history.requests.map((all, place) => (all ? (100 * (history.fallbacks[place] ?? 0)) / all : null));
  const per = `per ${data.span}`;
  const period = data.span === "hour" ? "last 24 hours" : "last 2 hours";
  return (
    <div class="panels four trends">
      <Trend
        title="Devices reporting"
        per={per}
        period={period}
        at={history.at}
        values={history.at.map((at) => devices.get(at) ?? null)}
        format={count}
        colour="device"
        whole
      />
      <Trend
        title="p95"
        per={`mean ${per}`}
        period={period}
        at={history.at}
        values={history.p95}
        format={seconds}
        colour="ink"
      />
      <Trend
        title="Fallbacks"
        per={per}
        period={period}
        at={history.at}
        values={shares}
        format={(share) => percent(share, 100)}
        colour="link"
      />
      <Trend
        title="Requests"
        per={per}
        period={period}
        at={history.at}
        values={history.requests}
        format={count}
        colour="remote"
        whole
      />
    </div>
  );
}

interface TrendProps {
  title: string;
  per: string;
  period: string;
  at: number[];
  values: (number | null)[];
  format: (value: number) => string;
  colour: Colour;
  whole?: boolean;
}

function Trend({ title, per, period, at, values, format, colour, whole = false }: TrendProps) {
  const newest = values.findLast((value) => value !== null);
  return (
    <Panel title={title} note={`${per}, ${period}`}>
      <Chart
        label={`${title} ${per}, ${period}. Newest: ${newest === undefined || newest === null ? "none" : format(newest)}`}
        x={at}
        xAxis={TIME}
        yAxis={{ format, least: 0, whole }}
        lines={[{ label: title.toLowerCase(), colour, values, filled: true, width: 1.5 }]}
        height={110}
      />
    </Panel>
  );
}
