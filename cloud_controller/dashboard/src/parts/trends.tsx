// The fleet's last 24 hours in four small charts: devices that report, p95, fallbacks and requests.

import { clock } from "../data/cell";
import { fromBuckets } from "../data/history";
import { useResource } from "../data/resource";
import type { FleetTrend } from "../data/types";
import { count, NONE, percent, seconds } from "../format";
import { Chart, type Colour } from "./chart";
import { Panel } from "./notes";

const EVERY_S = 60;
const TIME = { format: (value: number) => String(value), time: true };

interface Trend {
  title: string;
  values: (number | null)[];
  format: (value: number) => string;
  colour: Colour;
  whole: boolean;
}

export function Trends() {
  const { data } = useResource<FleetTrend>("/v1/views/fleet/trend", () => false, EVERY_S);
  // the newest bucket is not over: in it there is less of everything
  const buckets = data?.buckets.filter((bucket) => bucket.at + bucket.span_s <= clock.value) ?? [];
  if (data === null || buckets.length === 0) return null;
  const history = fromBuckets(buckets);
  const devices = new Map(buckets.map((bucket) => [bucket.at, bucket.devices]));
  const reporting = history.at.map((at) => devices.get(at) ?? null);
  const shares = history.requests.map((all, place) => (all ? (100 * (history.fallbacks[place] ?? 0)) / all : null));
  const period = `per ${data.span}, last ${data.span === "hour" ? "24 hours" : "2 hours"}`;
  const trends: Trend[] = [
    { title: "Devices reporting", values: reporting, format: count, colour: "device", whole: true },
    { title: "Mean p95", values: history.p95, format: seconds, colour: "ink", whole: false },
    { title: "Fallbacks", values: shares, format: (share) => percent(share, 100), colour: "link", whole: false },
    { title: "Requests", values: history.requests, format: count, colour: "remote", whole: true },
  ];
  return (
    <div class="panels four trends">
      {trends.map(({ title, values, format, colour, whole }) => (
        <Panel key={title} title={title} note={period}>
          <Chart
            label={`${title} ${period}. Newest: ${newest(values, format)}`}
            x={history.at}
            xAxis={TIME}
            yAxis={{ format, least: 0, whole }}
            lines={[{ label: title, colour, values, filled: true, width: 1.5 }]}
            height={110}
          />
        </Panel>
      ))}
    </div>
  );
}

function newest(values: (number | null)[], format: (value: number) => string): string {
  const value = values.findLast((each) => each !== null);
  return value === undefined || value === null ? NONE : format(value);
}
