// One device: desired and reported releases, measurements, and its operating point on the curves of its plan.

import { useState } from "preact/hooks";
import { clock, useCell } from "../data/cell";
import { bare, latestTelemetry, type ModelStatus, modelStatuses } from "../data/desired_reported";
import { fromBuckets, fromReports, modelsOf, type Range } from "../data/history";
import { useResource } from "../data/resource";
import { may } from "../data/session";
import type { Device, DeviceCurves, DeviceHistory, Event, Telemetry } from "../data/types";
import { age, bytes, figure, moment, NONE, rate, seconds, short } from "../format";
import { AuditFigures } from "../parts/audits";
import { CommandText } from "../parts/command_text";
import { CurveChart, inWords, nameOf, PlanTable, value } from "../parts/curves";
import { Figures } from "../parts/figures";
import { BandwidthChart, EnergyChart, LatencyChart, PowerChart, Ranges, RequestsChart } from "../parts/history_charts";
import { Logs } from "../parts/logs";
import { Empty, Loading, Panel, Problem } from "../parts/notes";
import { Origin, Status } from "../parts/status";
import { type Column, Table } from "../parts/table";
import { UndeployButton } from "../parts/undeploy";
import { to } from "../route";
import { isAgent } from "./agents";
import { EventTable } from "./events";

const NEWEST_EVENTS = 100;

export function DevicePage({ name }: { name: string }) {
  const own = (change: { kind: string; subject: string }) =>
    (change.kind === "device" || change.kind === "alert") && change.subject === name;
  const encoded = encodeURIComponent(name);
  const { data, error, again } = useResource<Device>(`/v1/devices/${encoded}`, own);
  const reports = useResource<Telemetry[]>(`/v1/telemetry/${encoded}?newest=360`, own);
  const curves = useResource<DeviceCurves[]>(`/v1/views/devices/${encoded}/curves`, own);
  const events = useResource<Event[]>(`/v1/views/devices/${encoded}/events?newest=${NEWEST_EVENTS}`, own);
  const [model, setModel] = useState("");
  if (data === null) return error ? <Problem error={error} again={again} /> : <Loading />;
  const plans = curves.data ?? [];
  const models = [...new Set([...modelsOf(reports.data ?? []), ...plans.map((plan) => bare(plan.model))])];
  const chosen = models.includes(model) ? model : (models[0] ?? "");
  return (
    <>
      <Head device={data} />
      {error && <Problem error={error} again={again} />}
      <Warnings device={data} />
      <Removal device={data} />
      <Facts device={data} />
      <Models device={data} />
      {(data.audits ?? []).map((audits) => (
        <Panel
          key={audits.model}
          title={`Who answers for ${audits.model}`}
          note={
            <>
              since release <code>{short(audits.release)}</code> runs there
            </>
          }
        >
          <AuditFigures audits={audits} old={data.state !== "online"} />
        </Panel>
      ))}
      {models.length > 1 && <Choice models={models} chosen={chosen} onChoose={setModel} />}
      <Charts device={data} reports={reports.data} model={chosen} own={own} />
      {plans
        .filter((plan) => bare(plan.model) === chosen)
        .map((plan) => (
          <PlanPanel key={plan.model} plan={plan} live={data.state === "online"} />
        ))}
      {may("operator") && <Logs name={name} own={own} />}
      <Panel title="Events" note={(events.data?.length ?? 0) >= NEWEST_EVENTS ? `the newest ${NEWEST_EVENTS}` : ""}>
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
  const warnings = warningsOf(device, now);
  const conditions = device.conditions ?? [];
  if (warnings.length === 0 && conditions.length === 0) return null;
  return (
    <ul class="warnings">
      {warnings.map((warning) => (
        <li key={warning}>{warning}</li>
      ))}
      {conditions.map((condition) => (
        <li key={condition.kind}>
          <b>{condition.kind}</b>
          {condition.text !== "" && `: ${condition.text}`} <span class="faint">· since {moment(condition.since)}</span>
          {!condition.current && <span class="old"> · from its last report</span>}
          {condition.remedy !== "" && (
            <div class="faint">
              <CommandText text={condition.remedy} />
            </div>
          )}
        </li>
      ))}
    </ul>
  );
}

/** How to remove it, where it can be: a browser session may not delete records, so the command is shown. */
function Removal({ device }: { device: Device }) {
  if (!may("operator") || !["revoked", "claimed"].includes(device.state)) return null;
  return (
    <p class="words faint">
      {device.state === "revoked"
        ? "To delete it with its history and logs, and to free its name:"
        : "To withdraw this claim and free its name:"}{" "}
      <code>edgectl device remove {device.name}</code>
    </p>
  );
}

/** What its state and its last report mean for the figures of the page. */
function warningsOf(device: Device, now: number): string[] {
  const warnings: string[] = [];
  const ago = age(device.last_seen, now);
  if (device.state === "stale") warnings.push(`No message for ${ago}: the figures are those of its last report.`);
  if (device.state === "offline")
    warnings.push(`Disconnected; last seen ${ago} ago. The figures are those of its last report.`);
  if (device.state === "revoked")
    warnings.push("Its certificates are revoked: it keeps running its releases, and its connections are refused.");
  for (const window of latestTelemetry(device)?.models ?? [])
    if (window.problem) warnings.push(`${window.model}: ${window.problem}`);
  return warnings;
}

function Facts({ device }: { device: Device }) {
  const now = useCell(clock);
  const telemetry = latestTelemetry(device);
  const { machine, power } = telemetry ?? {};
  const facts: [string, string][] = [
    ["last seen", device.last_seen === null ? "never" : `${age(device.last_seen, now)} ago`],
    ["temperature", isKnown(power?.celsius) ? `${figure(power.celsius)} °C` : NONE],
    ["memory free", freeOf(machine?.memory_free_bytes, machine?.memory_bytes)],
    ["disk free", freeOf(machine?.disk_free_bytes, machine?.disk_bytes)],
    ["uplink", telemetry ? rate(telemetry.up_bytes_per_s) : NONE],
    ["round trip", telemetry ? seconds(telemetry.rtt_s) : NONE],
    ["remote", telemetry ? (telemetry.remote_usable ? "reachable" : "unreachable") : NONE],
    ["address", device.local_url ?? NONE],
    ["agent", device.agent_version ?? NONE],
  ];
  if (device.gateway) facts.push(["gateway", device.gateway]);
  const protocol: [string, string][] = [
    ["session", device.session ? String(device.session) : NONE],
    ["newest statement", device.counter ? String(device.counter) : NONE],
    ["applied statement", applied(device)],
  ];
  return (
    <>
      <Figures facts={facts} old={device.state !== "online"} />
      <details>
        <summary>Session and statements</summary>
        <Figures facts={protocol} old={device.state !== "online"} />
      </details>
    </>
  );
}

function isKnown(value: number | null | undefined): value is number {
  return value !== null && value !== undefined;
}

function freeOf(free: number | null | undefined, all: number | null | undefined): string {
  if (!isKnown(free)) return NONE;
  return isKnown(all) ? `${bytes(free)} of ${bytes(all)}` : bytes(free);
}

function applied(device: Device): string {
  if (!device.acted_upon) return "none";
  return device.acted_upon === device.counter ? "the newest" : `older: ${device.acted_upon}`;
}

function Models({ device }: { device: Device }) {
  const rows = modelStatuses(device);
  const command = `edgectl deploy MODEL --to ${device.name}`;
  const canUndeploy = may("operator") && device.state !== "revoked";
  return (
    <Panel title="Desired and reported">
      {rows.length === 0 ? (
        <Empty command={command}>No release is assigned to this device.</Empty>
      ) : (
        <Table
          name="cards"
          columns={canUndeploy ? [...MODELS, undeployColumn(device.name)] : MODELS}
          rows={rows}
          id={(row) => row.model}
        />
      )}
      <Reasons device={device} />
    </Panel>
  );
}

/** Why each model's last request was answered where it was: the agent's own sentences. */
function Reasons({ device }: { device: Device }) {
  const windows = (latestTelemetry(device)?.models ?? []).filter((window) => window.reason);
  if (windows.length === 0) return null;
  return (
    <dl class={`reasons${device.state === "online" ? "" : " old"}`} aria-label="Why these cuts">
      {windows.map((window) => (
        <div key={window.model}>
          <dt>Why {window.model} runs there</dt>
          <dd>{window.reason}</dd>
        </div>
      ))}
    </dl>
  );
}

const MODELS: readonly Column<ModelStatus>[] = [
  { title: "Model", heads: true, cell: (row) => <a href={to("models", row.model)}>{row.model}</a> },
  { title: "Desired", cell: (row) => <code>{short(row.desired) || "none"}</code> },
  {
    title: "Running",
    cell: (row) => <code>{short(row.running) || "none"}</code>,
    tone: (row) => (row.running === row.desired ? "" : "warn"),
  },
  { title: "State", cell: (row) => <Status state={row.state} /> },
  { title: "Cut in use", kind: "nowrap", cell: (row) => row.cut || NONE },
  {
    title: "Rollout",
    cell: (row) => (row.rollout ? <a href={to("rollouts", String(row.rollout))}>{row.rollout}</a> : NONE),
  },
  { title: "Detail", kind: "faint detail", cell: (row) => row.detail },
];

/** Offered where the model shall run; what is desired no more ends already, and the agent stays. */
function undeployColumn(device: string): Column<ModelStatus> {
  return {
    title: "Action",
    cell: (row) =>
      row.desired !== "" && !isAgent(row.model) && <UndeployButton model={bare(row.model)} device={device} />,
  };
}

function Choice({ models, chosen, onChoose }: { models: string[]; chosen: string; onChoose: (model: string) => void }) {
  return (
    <label class="choice">
      Model{" "}
      <select value={chosen} onChange={(event) => onChoose(event.currentTarget.value)}>
        {models.map((model) => (
          <option key={model}>{model}</option>
        ))}
      </select>
    </label>
  );
}

interface ChartsProps {
  device: Device;
  reports: Telemetry[] | null;
  model: string;
  own: (change: { kind: string; subject: string }) => boolean;
}

function Charts({ device, reports, model, own }: ChartsProps) {
  const [range, setRange] = useState<Range | null>(null);
  const path = `/v1/devices/${encodeURIComponent(device.name)}/history?span=${range?.span}`;
  const { data, error, again } = useResource<DeviceHistory>(range === null ? null : path, own, range ? 30 : undefined);
  if (reports === null) return <Loading />;
  if (reports.length === 0) {
    return (
      <Empty command="edgectl infer MODEL INPUT --device URL">
        This device has reported no measurements yet. It reports them once applications send requests:
      </Empty>
    );
  }
  const mark =
    device.emulated || device.simulated ? (
      <Origin emulated={device.emulated} simulated={device.simulated} />
    ) : undefined;
  const buckets = data?.buckets;
  const history =
    range === null ? fromReports(reports, model) : fromBuckets(buckets?.[model] ?? [], buckets?.[""] ?? []);
  return (
    <>
      <Ranges live chosen={range} onChoose={setRange} />
      {error && <Problem error={error} again={again} />}
      {history.at.length === 0 ? (
        <p class="none">{data === null ? "Loading…" : "No data for this period."}</p>
      ) : (
        <div class="panels two">
          <LatencyChart history={history} note={mark} />
          <BandwidthChart history={history} note={mark} />
          <RequestsChart history={history} note={mark} per={range?.per ?? "report"} />
          <PowerChart history={history} note={mark} />
          <EnergyChart history={history} note={mark} />
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
              {live ? "Now" : "At its last report"}: <b>{nameOf(curves, now.row)}</b> at {rate(now.up_bytes_per_s)} up
              {now.seconds !== null && `, for which the plan predicts ${value(curves, now.seconds)}`}.
            </p>
          )}
          <PlanTable curves={curves} inUse={now?.row} />
        </div>
      </div>
    </Panel>
  );
}
