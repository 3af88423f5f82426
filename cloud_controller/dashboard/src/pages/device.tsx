// One device: what it should run and runs, where its time goes now, and where on its plan's curves it stands.

import { useState } from "preact/hooks";
import { clock, useCell } from "../data/cell";
import { history, modelsOf, type Range, rolled } from "../data/history";
import { useResource } from "../data/resource";
import { type Served, served, told } from "../data/served";
import { may } from "../data/session";
import type { Device, DeviceCurves, DeviceHistory, Event, Telemetry } from "../data/types";
import { age, moment, NONE, rate, seconds, short } from "../format";
import { CurveChart, inWords, nameOf, PlanTable, value } from "../parts/curves";
import { Figures } from "../parts/figures";
import { BandwidthChart, EnergyChart, LatencyChart, PowerChart, Ranges, RequestsChart } from "../parts/history_charts";
import { Logs } from "../parts/logs";
import { Empty, Loading, Panel, Problem } from "../parts/notes";
import { Spelt } from "../parts/spelt";
import { Origin, Status } from "../parts/status";
import { type Column, Table } from "../parts/table";
import { to } from "../route";
import { EventTable } from "./events";

export function DevicePage({ name }: { name: string }) {
  const own = (change: { kind: string; subject: string }) =>
    (change.kind === "device" || change.kind === "alert") && change.subject === name;
  const encoded = encodeURIComponent(name);
  const { data, error, again } = useResource<Device>(`/v1/devices/${encoded}`, own);
  const told = useResource<Telemetry[]>(`/v1/telemetry/${encoded}?newest=360`, own);
  const curves = useResource<DeviceCurves[]>(`/v1/views/devices/${encoded}/curves`, own);
  const events = useResource<Event[]>(`/v1/views/devices/${encoded}/events`, own);
  const [model, setModel] = useState("");
  if (data === null) return error ? <Problem error={error} again={again} /> : <Loading />;
  const models = modelsOf(told.data ?? []);
  const chosen = models.includes(model) ? model : (models[0] ?? "");
  return (
    <>
      <Head device={data} />
      {error && <Problem error={error} again={again} />}
      <Warnings device={data} />
      <Facts device={data} />
      <Serves device={data} />
      {models.length > 1 && <Choice models={models} chosen={chosen} onChoose={setModel} />}
      <Charts device={data} told={told.data} model={chosen} own={own} />
      {(curves.data ?? []).map((one) => (
        <PlanPanel key={one.model} plan={one} live={data.state === "online"} />
      ))}
      {may("operator") && <Logs name={name} own={own} />}
      <Panel title="Events">
        {events.data === null || events.data.length === 0 ? (
          <p class="none">None.</p>
        ) : (
          <EventTable events={events.data.toReversed()} />
        )}
      </Panel>
    </>
  );
}

function Head({ device }: { device: Device }) {
  const labels = Object.entries(device.labels);
  return (
    <div class="head">
      <h1>{device.name}</h1>
      <Status state={device.state} />
      <Origin emulated={device.emulated} simulated={device.simulated} />
      <span class="faint">
        {device.device_class}
        {device.group !== "" && ` · group ${device.group}`}
        {labels.map(([key, label]) => ` · ${key}=${label}`)}
      </span>
    </div>
  );
}

function Warnings({ device }: { device: Device }) {
  const now = useCell(clock);
  const found = sayings(device, now);
  const wrong = device.conditions ?? [];
  if (found.length === 0 && wrong.length === 0) return null;
  return (
    <ul class="warnings">
      {found.map((one) => (
        <li key={one}>{one}</li>
      ))}
      {wrong.map((one) => (
        <li key={one.kind}>
          <b>{one.kind}</b>
          {one.text !== "" && `: ${one.text}`} <span class="faint">· since {moment(one.since)}</span>
          {!one.current && <span class="old"> · by its last word</span>}
          {one.remedy !== "" && (
            <div class="faint">
              <Spelt text={one.remedy} />
            </div>
          )}
        </li>
      ))}
    </ul>
  );
}

/** What its state and its last report mean for what stands below. */
function sayings(device: Device, now: number): string[] {
  const found: string[] = [];
  const ago = age(device.last_seen, now);
  if (device.state === "stale") found.push(`Silent for ${ago}: everything below is its last word.`);
  if (device.state === "offline")
    found.push(`Its connection ended; last heard of ${ago} ago. Everything below is of then.`);
  if (device.state === "revoked")
    found.push("Its certificates are revoked. It runs what it has, and nobody believes it.");
  for (const window of told(device)?.models ?? []) if (window.problem) found.push(`${window.model}: ${window.problem}`);
  return found;
}

function Facts({ device }: { device: Device }) {
  const now = useCell(clock);
  const telemetry = told(device);
  const facts: [string, string][] = [
    ["seen", device.last_seen === null ? "never" : `${age(device.last_seen, now)} ago`],
    ["agent", device.agent_version ?? NONE],
    ["session", device.session ? String(device.session) : NONE],
    ["uplink", telemetry ? rate(telemetry.up_bytes_per_s) : NONE],
    ["round trip", telemetry ? seconds(telemetry.rtt_s) : NONE],
    ["remote", telemetry ? (telemetry.remote_usable ? "answers" : "does not answer") : NONE],
    ["statement", device.counter ? String(device.counter) : NONE],
    ["acted upon", acted(device)],
  ];
  if (device.gateway) facts.push(["through", device.gateway]);
  return <Figures facts={facts} old={device.state !== "online"} />;
}

function acted(device: Device): string {
  if (!device.acted_upon) return "nothing yet";
  return device.acted_upon === device.counter ? "the newest" : `an older one, ${device.acted_upon}`;
}

function Serves({ device }: { device: Device }) {
  const rows = served(device);
  const command = `edgectl deploy MODEL --to ${device.name}`;
  return (
    <Panel title="Desired and reported">
      {rows.length === 0 ? (
        <Empty command={command}>Nothing is wanted of this device.</Empty>
      ) : (
        <Table columns={SERVED} rows={rows} id={(row) => row.model} />
      )}
    </Panel>
  );
}

const SERVED: readonly Column<Served>[] = [
  { title: "Model", heads: true, cell: (row) => <a href={to("models", row.model)}>{row.model}</a> },
  { title: "Desired", cell: (row) => <code>{short(row.wanted) || "nothing"}</code> },
  {
    title: "Running",
    cell: (row) => <code>{short(row.running) || "nothing"}</code>,
    tone: (row) => (row.running === row.wanted ? "" : "warn"),
  },
  { title: "State", cell: (row) => <Status state={row.state} /> },
  { title: "Cut in use", cell: (row) => row.cut || NONE },
  { title: "Why", kind: "faint detail", cell: (row) => row.why },
];

function Choice({ models, chosen, onChoose }: { models: string[]; chosen: string; onChoose: (model: string) => void }) {
  return (
    <label class="choice">
      Model{" "}
      <select value={chosen} onChange={(event) => onChoose(event.currentTarget.value)}>
        {models.map((one) => (
          <option key={one}>{one}</option>
        ))}
      </select>
    </label>
  );
}

interface ChartsProps {
  device: Device;
  told: Telemetry[] | null;
  model: string;
  own: (change: { kind: string; subject: string }) => boolean;
}

function Charts({ device, told, model, own }: ChartsProps) {
  const [range, setRange] = useState<Range | null>(null);
  const path = `/v1/devices/${encodeURIComponent(device.name)}/history?span=${range?.span}`;
  const { data, error, again } = useResource<DeviceHistory>(range === null ? null : path, own, range ? 30 : undefined);
  if (told === null) return <Loading />;
  if (told.length === 0) {
    return (
      <Empty command="edgectl infer MODEL INPUT --device URL">
        This device has reported no measurements yet. It does once applications ask it:
      </Empty>
    );
  }
  const mark =
    device.emulated || device.simulated ? (
      <Origin emulated={device.emulated} simulated={device.simulated} />
    ) : undefined;
  const buckets = data?.buckets;
  const made = range === null ? history(told, model) : rolled(buckets?.[model] ?? [], buckets?.[""] ?? []);
  return (
    <>
      <Ranges live chosen={range} onChoose={setRange} />
      {error && <Problem error={error} again={again} />}
      {made.at.length === 0 ? (
        <p class="none">{data === null ? "Reading…" : "Nothing was added up for that time."}</p>
      ) : (
        <div class="panels two">
          <LatencyChart made={made} note={mark} />
          <BandwidthChart made={made} note={mark} />
          <RequestsChart made={made} note={mark} per={range?.per ?? "report"} />
          <PowerChart made={made} note={mark} />
          <EnergyChart made={made} note={mark} />
        </div>
      )}
    </>
  );
}

function PlanPanel({ plan, live }: { plan: DeviceCurves; live: boolean }) {
  const { curves, now } = plan;
  const note = (
    <>
      release <code>{short(plan.release)}</code>, device times{" "}
      <span class={curves.basis === "predicted" ? "mark" : ""}>{curves.basis}</span>
    </>
  );
  return (
    <Panel title={`Plan of ${plan.model}`} note={note}>
      <div class="panels two plain">
        <div>
          <CurveChart curves={curves} now={now} />
          <p class="words faint">
            At a round trip of {seconds(curves.rtt_s)}. {inWords(curves)}
          </p>
        </div>
        <div>
          {now !== null && (
            <p class={live ? "words" : "words old"}>
              {live ? "Now" : "When last heard of"}: <b>{nameOf(curves, now.row)}</b> at {rate(now.up_bytes_per_s)} up
              {now.seconds !== null && `, for which the plan predicts ${value(curves, now.seconds)}`}.
            </p>
          )}
          <PlanTable curves={curves} inUse={now?.row} />
        </div>
      </div>
    </Panel>
  );
}
