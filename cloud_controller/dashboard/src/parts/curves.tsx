// A plan over bandwidth: each row of its table thin, the best at each bandwidth thick, and where the device is now.

import type { CurveRow, Curves, DeviceCurves } from "../data/types";
import { bytes, cutName, figure, percent, rate, seconds, times } from "../format";
import { Chart, type Colour, type Line } from "./chart";

const CUTS: readonly Colour[] = ["cut1", "cut2", "cut3", "cut4"];

export function rowColours(rows: readonly CurveRow[]): Map<string, Colour> {
  let inside = 0;
  return new Map(
    rows.map((row) => {
      const own = row.local ? "device" : row.split_after === "" ? "remote" : CUTS[inside++ % CUTS.length];
      return [row.name, own ?? "cut1"];
    }),
  );
}

export function value(curves: Curves, amount: number): string {
  return curves.unit === "s" ? seconds(amount) : curves.unit === "J" ? `${figure(amount)} J` : figure(amount);
}

export function CurveChart({ curves, now }: { curves: Curves; now?: DeviceCurves["now"] }) {
  const colours = rowColours(curves.rows);
  const x = curves.up_bytes_per_s.map((bytesPerS) => bytesPerS * 8e-6);
  const tooltip = (row: CurveRow) => (index: number) => value(curves, row.line[index] ?? 0);
  const thin: Line[] = curves.rows.map((row) => ({
    label: name(row),
    colour: colours.get(row.name) ?? "ink",
    values: row.line,
    tooltip: tooltip(row),
    width: 1.25,
  }));
  const thick: Line[] = curves.rows.map((row) => ({
    label: `${name(row)}, where it is best`,
    colour: colours.get(row.name) ?? "ink",
    values: row.line.map((cost, index) => (touches(curves.best, index, row.name) ? cost : null)),
    width: 4,
    unlisted: true,
  }));
  const point =
    now?.seconds === null || now === null || now === undefined
      ? undefined
      : { x: now.up_bytes_per_s * 8e-6, y: now.seconds, label: `now: ${nameOf(curves, now.row)}` };
  return (
    <Chart
      label={`Cost of each row of the plan over bandwidth. ${inWords(curves)}`}
      x={x}
      lines={[...thin, ...thick]}
      xAxis={{ format: (mbps) => `${figure(mbps)} Mbit/s`, logarithmic: true, name: "uplink" }}
      rest={8e-6 * (now?.up_bytes_per_s ?? curves.link.up_bytes_per_s)}
      yAxis={{ format: (cost) => value(curves, cost), logarithmic: true }}
      height={260}
      point={point}
    />
  );
}

/** Which row is best from which bandwidth on. The names of rows, which have their own case, begin no sentence. */
export function inWords(curves: Curves): string {
  const parts: string[] = [];
  curves.best.forEach((row, index) => {
    if (index === 0) parts.push(`On slow uplinks ${nameOf(curves, row)} is best`);
    else if (row !== curves.best[index - 1])
      parts.push(`${nameOf(curves, row)} from ${rate(curves.up_bytes_per_s[index])}`);
  });
  return parts.length === 1
    ? `At every bandwidth shown ${nameOf(curves, curves.best[0] ?? "")} is best.`
    : `${parts.join(", ")}.`;
}

export function nameOf(curves: Curves, row: string): string {
  const match = curves.rows.find((candidate) => candidate.name === row);
  return match === undefined ? row : name(match);
}

function name(row: CurveRow): string {
  const packed = [...row.codecs.filter((codec) => codec !== "raw"), ...(row.compress ? ["zstd"] : [])];
  // the name of a cut says how its tensors travel
  return packed.length === 0 || row.split_after !== "" ? cutName(row) : `${cutName(row)}, ${packed.join("+")}`;
}

/** The thick line reaches the point at which the next row takes over, so that it has no gaps. */
function touches(best: readonly string[], index: number, row: string): boolean {
  return best[index] === row || (best[index - 1] === row && index > 0);
}

/** The rows of the plan at its planned link: the latency of each, and its parts on device, link and remote. */
export function PlanTable({ curves, inUse }: { curves: Curves; inUse?: string | undefined }) {
  const longest = Math.max(...curves.rows.map((row) => row.total_s));
  const lossy = curves.rows.some((row) => row.loss > 0);
  return (
    <div class="scroll">
      <table class="plan">
        <thead>
          <tr>
            <th scope="col">Cut</th>
            <th scope="col">
              <span class="key device">device</span> <span class="key link">link</span>{" "}
              <span class="key remote">remote</span>
            </th>
            <th scope="col" class="number">
              Latency
            </th>
            <th scope="col" class="number">
              Sent up
            </th>
            {lossy && (
              <th scope="col" class="number">
                Loss
              </th>
            )}
          </tr>
        </thead>
        <tbody>
          {curves.rows.map((row) => (
            <tr key={row.name} class={row.name === curves.gain.best ? "best" : ""}>
              <th scope="row">
                <span class="nowrap">{row.name}</span>
                {name(row).slice(row.name.length)}
                {row.name === curves.gain.best && <span class="mark plain">best at the planned link</span>}
                {row.name === inUse && <span class="mark plain">in use</span>}
              </th>
              <td>
                <Split row={row} longest={longest} />
              </td>
              <td class="number">{seconds(row.total_s)}</td>
              <td class="number">{row.local ? "nothing" : bytes(row.up_bytes)}</td>
              {lossy && <td class="number">{row.loss > 0 ? percent(row.loss, 1) : "none"}</td>}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Split({ row, longest }: { row: CurveRow; longest: number }) {
  const parts = [
    ["device", row.device_s],
    ["link", row.link_s],
    ["remote", row.remote_s],
  ] as const;
  const words = parts.map(([part, took]) => `${part} ${seconds(took)}`).join(", ");
  return (
    <div class="split" role="img" aria-label={words} title={words}>
      {parts.map(([part, took]) => (
        <span key={part} class={part} style={{ width: `${(100 * took) / longest}%` }} />
      ))}
    </div>
  );
}

export function Gain({ curves }: { curves: Curves }) {
  const { over_local, over_remote } = curves.gain;
  return (
    <dl class="figures">
      <div>
        <dt>over all on the device</dt>
        <dd>{times(over_local)}</dd>
      </div>
      <div>
        <dt>over all remote</dt>
        <dd title={over_remote === null ? "all-remote is best at no bandwidth, so that the table leaves it out" : ""}>
          {times(over_remote)}
        </dd>
      </div>
      <div>
        <dt>planned for</dt>
        <dd>
          {rate(curves.link.up_bytes_per_s)}, {seconds(curves.link.rtt_s)}
        </dd>
      </div>
      <div>
        <dt>objective</dt>
        <dd>{curves.objective}</dd>
      </div>
      <div>
        <dt>fallback</dt>
        <dd>{curves.fallback}</dd>
      </div>
    </dl>
  );
}
