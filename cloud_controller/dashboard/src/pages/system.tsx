// The controller itself: health, components, notices about keys, and problems in the fleet by kind.

import { useResource } from "../data/resource";
import { STATES } from "../data/summary";
import type { Keys } from "../data/types";
import { count, moment } from "../format";
import { CommandText } from "../parts/command_text";
import { type Fact, Figures } from "../parts/figures";
import { ComponentTable } from "../parts/health";
import { Loading, Panel, Problem } from "../parts/notes";
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
      <ComponentTable />
      <Panel title="Problems by kind">
        {fleet.data !== null && fleet.data.conditions.length === 0 && <p class="none">No device reports a problem.</p>}
        <Table bare columns={CONDITIONS} rows={fleet.data?.conditions ?? []} id={(condition) => condition.kind} />
      </Panel>
      <Panel title="Keys">
        {keys.error && <Problem error={keys.error} again={keys.again} />}
        {keys.data !== null && keys.data.notices.length === 0 && (
          <p class="none">No key needs action by an operator.</p>
        )}
        <ul class="warnings">
          {(keys.data?.notices ?? []).map((notice) => (
            <li key={notice}>
              <CommandText text={notice} />
            </li>
          ))}
        </ul>
      </Panel>
    </>
  );
}

/** Devices by state, how many are emulated or simulated, and agents by version. */
function counts(fleet: Overview | null): Fact[] {
  const devices = fleet?.devices ?? {};
  return [
    ...STATES.map((state): Fact => [state, count(devices[state] ?? 0)]),
    ...["emulated", "simulated"]
      .filter((kind) => (devices[kind] ?? 0) > 0)
      .map((kind): Fact => [`of them ${kind}`, <span key={kind}>{count(devices[kind] ?? 0)}</span>]),
    ...(fleet?.agents ?? []).map(({ agent, devices }): Fact => [`agent ${agent || "unknown"}`, count(devices)]),
  ];
}

const CONDITIONS: readonly Column<Overview["conditions"][number]>[] = [
  { title: "Devices", kind: "number", cell: (condition) => count(condition.devices) },
  {
    title: "Problem",
    heads: true,
    cell: (condition) => (
      <>
        {condition.kind}
        <div class="faint">
          <CommandText text={condition.remedy ?? ""} />
        </div>
      </>
    ),
  },
  { title: "Since", kind: "nowrap", cell: (condition) => `since ${moment(condition.since)}` },
  { title: "For example", cell: (condition) => <a href={to("devices", condition.example)}>{condition.example}</a> },
];
