// One device: what it should run and runs, where its time goes now, and where on its plan's curves it stands.

import { useState } from "preact/hooks";
import { clock, useCell } from "../data/cell";
import { modelsOf } from "../data/history";
import { useResource } from "../data/resource";
import type { Device, DeviceCurves, Event, Telemetry } from "../data/types";
import { age, moment, NONE, rate, seconds, short } from "../format";
import { CurveChart, inWords, nameOf, PlanTable, value } from "../parts/curves";
import { BandwidthChart, LatencyChart, PowerChart, RequestsChart } from "../parts/device_charts";
import { Empty, Loading, Panel, Problem } from "../parts/notes";
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
  const found: string[] = [];
  if (device.state === "stale")
    found.push(`Silent for ${age(device.last_seen, now)}: everything below is its last word.`);
  if (device.state === "offline")
    found.push(`Its connection ended; last heard of ${age(device.last_seen, now)} ago. Everything below is of then.`);
  if (device.state === "revoked")
    found.push("Its certificates are revoked. It runs what it has, and nobody believes it.");
  if (device.safe_mode) found.push(`Safe mode: ${device.safe_mode}`);
  if (device.trouble) found.push(`It does not obey its newest statement: ${device.trouble}`);
  if (device.copied) found.push(`Its identity was copied: two agents took turns, last seen ${moment(device.copied)}.`);
  if (device.flooded && device.flooded.held_until > now)
    found.push(`Held off for sending too much, until ${moment(device.flooded.held_until)}.`);
  if (device.telemetry?.power?.under_voltage) found.push("Under-voltage: its supply does not hold.");
  for (const window of device.telemetry?.models ?? [])
    if (window.trouble) found.push(`${window.model}: ${window.trouble}`);
  if (found.length === 0) return null;
  return (
    <ul class="warnings">
      {found.map((one) => (
        <li key={one}>{one}</li>
      ))}
    </ul>
  );
}

function Facts({ device }: { device: Device }) {
  const now = useCell(clock);
  const { telemetry } = device;
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
                    {row.model.includes("@") ? <a href={to("models", row.model)}>{row.model}</a> : row.model}
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

/** What the controller wants beside what the device says: one line per model. */
function served(device: Device): Served[] {
  const windows = new Map((device.telemetry?.models ?? []).map((one) => [one.model, one]));
  const reported = device.models.map((one) => {
    const desired = device.desired.find((wish) => wish.model === one.model.split("@")[0]);
    return {
      model: one.model,
      wanted: desired?.release ?? "",
      running: one.release,
      state: one.state,
      cut: windows.get(one.model)?.row ?? "",
      why: one.detail,
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
      why: "the device has not spoken of it",
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
