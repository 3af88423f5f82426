// The controller itself: who answers, what the keys wait for, and what is wrong in the fleet, grouped by cause.

import { useResource } from "../data/resource";
import { STATES } from "../data/summary";
import type { Keys } from "../data/types";
import { count, moment } from "../format";
import { Loading, Panel, Problem } from "../parts/notes";
import { Spelt } from "../parts/spelt";
import { Status } from "../parts/status";
import { to } from "../route";

interface Health {
  status: string;
  version: string;
}

interface Overview {
  devices: Record<string, number>;
  agents: { agent: string; devices: number }[];
  conditions: { kind: string; devices: number; since: number; example: string; do?: string }[];
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
          <dl class="figures">
            <Fact name="status" value={health.data.status} />
            <Fact name="version" value={health.data.version} />
          </dl>
        </Panel>
        <Panel title="Devices">
          {fleet.error && <Problem error={fleet.error} again={fleet.again} />}
          <dl class="figures">
            {STATES.map((state) => (
              <div key={state}>
                <dt>
                  <Status state={state} />
                </dt>
                <dd>{count(fleet.data?.devices[state] ?? 0)}</dd>
              </div>
            ))}
            {(fleet.data?.agents ?? []).map((one) => (
              <Fact key={one.agent} name={`agent ${one.agent || "unknown"}`} value={count(one.devices)} />
            ))}
          </dl>
        </Panel>
      </div>
      <Panel title="What is wrong, by kind">
        {fleet.data !== null && fleet.data.conditions.length === 0 && <p class="none">No device says so of itself.</p>}
        <table>
          <tbody>
            {(fleet.data?.conditions ?? []).map((one) => (
              <tr key={one.kind}>
                <td class="number">{count(one.devices)}</td>
                <th scope="row">
                  {one.kind}
                  <div class="faint">
                    <Spelt text={one.do ?? ""} />
                  </div>
                </th>
                <td class="nowrap">since {moment(one.since)}</td>
                <td>
                  <a href={to("devices", one.example)}>{one.example}</a>
                </td>
              </tr>
            ))}
          </tbody>
        </table>
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

function Fact({ name, value }: { name: string; value: string }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{value}</dd>
    </div>
  );
}
