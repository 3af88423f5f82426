// One device: what it should run and runs, where its time goes now, and where on its plan's curves it stands.

import { useState } from "preact/hooks";
import { post } from "../data/api";
import { clock, useCell } from "../data/cell";
import { modelsOf } from "../data/history";
import { useResource } from "../data/resource";
import { may } from "../data/session";
import type { Bundle, Device, DeviceCurves, Difference, Event, Telemetry } from "../data/types";
import { age, moment, NONE, rate, seconds, short } from "../format";
import { CurveChart, inWords, nameOf, PlanTable, value } from "../parts/curves";
import { BandwidthChart, LatencyChart, PowerChart, RequestsChart } from "../parts/device_charts";
import { Empty, Loading, Panel, Problem } from "../parts/notes";
import { Spelt } from "../parts/spelt";
import { Origin, Status } from "../parts/status";
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
      <Charts device={data} told={told.data} model={chosen} />
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
          {one.do !== "" && (
            <div class="faint">
              <Spelt text={one.do} />
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
  for (const window of told(device)?.models ?? []) if (window.trouble) found.push(`${window.model}: ${window.trouble}`);
  return found;
}

/** Its newest measurements, of now or not: the page says which. */
function told(device: Device): Telemetry | null {
  return device.telemetry ?? device.last_telemetry ?? null;
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
    ["remote", telemetry ? (telemetry.remote_ok ? "answers" : "does not answer") : NONE],
    ["statement", device.counter ? String(device.counter) : NONE],
    ["acted upon", acted(device)],
  ];
  if (device.gateway) facts.push(["through", device.gateway]);
  return (
    <dl class={`figures${device.state === "online" ? "" : " old"}`}>
      {facts.map(([name, fact]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{fact}</dd>
        </div>
      ))}
    </dl>
  );
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
        <div class="scroll">
          <table>
            <thead>
              <tr>
                <th scope="col">Model</th>
                <th scope="col">Desired</th>
                <th scope="col">Running</th>
                <th scope="col">State</th>
                <th scope="col">Cut in use</th>
                <th scope="col">Why</th>
              </tr>
            </thead>
            <tbody>
              {rows.map((row) => (
                <tr key={row.model}>
                  <th scope="row">
                    <a href={to("models", row.model)}>{row.model}</a>
                  </th>
                  <td>
                    <code>{short(row.wanted) || "nothing"}</code>
                  </td>
                  <td class={row.running === row.wanted ? "" : "warn"}>
                    <code>{short(row.running) || "nothing"}</code>
                  </td>
                  <td>
                    <Status state={row.state} />
                  </td>
                  <td>{row.cut || NONE}</td>
                  <td class="faint detail">{row.why}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Panel>
  );
}

interface Served {
  model: string;
  wanted: string;
  running: string;
  state: string;
  cut: string;
  why: string;
}

function why(difference: Difference | undefined, detail: string): string {
  if (difference === undefined || difference.reason === "as wanted") return detail;
  return [difference.reason, difference.why || detail].filter(Boolean).join(": ");
}

/** What the controller wants beside what the device says: one line per model. */
function served(device: Device): Served[] {
  const differences = new Map((device.differences ?? []).map((one) => [one.model.split("@")[0], one]));
  const windows = new Map((told(device)?.models ?? []).map((one) => [one.model, one]));
  const reported = device.models.map((one) => {
    const desired = device.desired.find((wish) => wish.model === one.model.split("@")[0]);
    return {
      model: one.model,
      wanted: desired?.release ?? "",
      running: one.release,
      state: one.last_state ?? one.state,
      cut: windows.get(one.model)?.row ?? "",
      why: why(differences.get(one.model.split("@")[0]), one.detail),
    };
  });
  const known = new Set(device.models.map((one) => one.model.split("@")[0]));
  const unheard = device.desired.filter((one) => !known.has(one.model));
  return [
    ...reported,
    ...unheard.map((one) => ({
      model: one.model,
      wanted: one.release,
      running: "",
      state: "told",
      cut: "",
      why: why(differences.get(one.model), "the device has not spoken of it"),
    })),
  ];
}

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

function Charts({ device, told, model }: { device: Device; told: Telemetry[] | null; model: string }) {
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
  return (
    <div class="panels two">
      <LatencyChart told={told} model={model} note={mark} />
      <BandwidthChart told={told} model={model} note={mark} />
      <RequestsChart told={told} model={model} note={mark} />
      <PowerChart told={told} model={model} note={mark} />
    </div>
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

/** Its recent log, versions and state, as it tells them when it is asked to. */
function Logs({ name, own }: { name: string; own: (change: { kind: string; subject: string }) => boolean }) {
  const path = `/v1/devices/${encodeURIComponent(name)}/logs`;
  const { data, error, again } = useResource<Bundle[]>(path, own);
  const [failed, setFailed] = useState<Error | null>(null);
  const ask = () => {
    setFailed(null);
    post(path).then(again, (reason: Error) => setFailed(reason));
  };
  const problem = failed ?? error;
  return (
    <Panel title="Log bundles" note="recent log, versions and state, without secrets">
      {problem && <Problem error={problem} />}
      {data !== null && data.length > 0 && (
        <div class="scroll">
          <table>
            <tbody>
              {data.map((one) => (
                <tr key={one.id}>
                  <th scope="row" class="nowrap">
                    {moment(one.asked)}
                  </th>
                  <td>by {one.who}</td>
                  <td>
                    {one.state}
                    {one.why !== "" && `: ${one.why}`}
                  </td>
                  <td>
                    {one.state === "here" && (
                      <a href={`${path}/${encodeURIComponent(one.id)}`} download={`${name}-${one.id}.json`}>
                        Download
                      </a>
                    )}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      <button type="button" onClick={ask}>
        Ask for its log
      </button>
    </Panel>
  );
}
