// The controller itself: who answers, what the keys wait for, and what is wrong in the fleet, grouped by cause.

import { useResource } from "../data/resource";
import { STATES } from "../data/summary";
import type { Keys } from "../data/types";
import { count, moment } from "../format";
import { type Fact, Figures } from "../parts/figures";
import { PartsTable } from "../parts/health";
import { Loading, Panel, Problem } from "../parts/notes";
import { Spelt } from "../parts/spelt";
import { type Column, Table } from "../parts/table";
import { to } from "../route";

interface Health {
  status: string;
  version: string;
}

interface Overview {
  devices: Record<string, number>;
  agents: { agent: string; devices: number }[];
  conditions: { kind: string; devices: number; since: number; example: string; remedy?: string }[];
}

export function SystemPage() {
  const health = useResource<Health>("/v1/health", () => false);
  const keys = useResource<Keys>("/v1/keys", () => false);
  const fleet = useResource<Overview>("/v1/fleet", (change) => change.kind === "device");
  if (health.data === null) return health.error ? <Problem error={health.error} again={health.again} /> : <Loading />;
  return (
    <>
      <h1>System</h1>
      <div class="panels two">
        <Panel title="Controller">
          <Figures
            facts={[
              ["status", health.data.status],
              ["version", health.data.version],
            ]}
          />
        </Panel>
        <Panel title="Devices">
          {fleet.error && <Problem error={fleet.error} again={fleet.again} />}
          <Figures facts={counts(fleet.data)} />
        </Panel>
      </div>
      <PartsTable />
      <Panel title="What is wrong, by kind">
        {fleet.data !== null && fleet.data.conditions.length === 0 && <p class="none">No device says so of itself.</p>}
        <Table bare columns={CONDITIONS} rows={fleet.data?.conditions ?? []} id={(one) => one.kind} />
      </Panel>
      <Panel title="Keys">
        {keys.error && <Problem error={keys.error} again={keys.again} />}
        {keys.data !== null && keys.data.notices.length === 0 && <p class="none">Nothing waits for an operator.</p>}
        <ul class="warnings">
          {(keys.data?.notices ?? []).map((one) => (
            <li key={one}>
              <Spelt text={one} />
            </li>
          ))}
        </ul>
      </Panel>
    </>
  );
}

/** Devices by state, those that are no real ones, and agents by version. */
function counts(fleet: Overview | null): Fact[] {
  const devices = fleet?.devices ?? {};
  return [
    ...STATES.map((state): Fact => [state, count(devices[state] ?? 0)]),
    ...["emulated", "simulated"]
      .filter((kind) => (devices[kind] ?? 0) > 0)
      .map((kind): Fact => [`of them ${kind}`, <span key={kind}>{count(devices[kind] ?? 0)}</span>]),
    ...(fleet?.agents ?? []).map((one): Fact => [`agent ${one.agent || "unknown"}`, count(one.devices)]),
  ];
}

const CONDITIONS: readonly Column<Overview["conditions"][number]>[] = [
  { title: "Devices", kind: "number", cell: (one) => count(one.devices) },
  {
    title: "What",
    heads: true,
    cell: (one) => (
      <>
        {one.kind}
        <div class="faint">
          <Spelt text={one.remedy ?? ""} />
        </div>
      </>
    ),
  },
  { title: "Since", kind: "nowrap", cell: (one) => `since ${moment(one.since)}` },
  { title: "For example", cell: (one) => <a href={to("devices", one.example)}>{one.example}</a> },
];
