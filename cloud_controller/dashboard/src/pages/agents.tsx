// Versions of the agent itself, where a row of `edgesplit-agent` on a device or a rollout leads: it is no model.

import { useResource } from "../data/resource";
import { bytes, count, moment } from "../format";
import { Empty, Loading, Problem } from "../parts/notes";
import { type Column, Table } from "../parts/table";

/** What releases of the agent are called where models are; no model may be called so. */
export const AGENT = "edgesplit-agent";

interface Build {
  python: string;
  machine: string;
  bytes: number;
}

interface AgentVersion {
  version: string;
  model: string;
  builds: Build[];
  devices: number;
  created_at: number;
}

export function isAgent(reference: string): boolean {
  return reference.split("@")[0] === AGENT;
}

/** `reference`: the version that is looked for, as in edgesplit-agent@3; without a number, all alike. */
export function AgentsPage({ reference }: { reference: string }) {
  const { data, error, again } = useResource<AgentVersion[]>("/v1/agents", (change) => change.kind === "model", 30);
  if (data === null) return error ? <Problem error={error} again={again} /> : <Loading />;
  return (
    <>
      <h1>Versions of the agent</h1>
      {error && <Problem error={error} again={again} />}
      {data.length === 0 ? (
        <Empty command="edgectl agent push KIT">No version of the agent is here yet.</Empty>
      ) : (
        <Table
          columns={COLUMNS}
          rows={data.toReversed()}
          id={(one) => one.model}
          marked={(one) => one.model === reference}
        />
      )}
    </>
  );
}

const COLUMNS: readonly Column<AgentVersion>[] = [
  { title: "Version", heads: true, cell: (one) => one.version },
  { title: "As", kind: "faint", cell: (one) => one.model },
  {
    title: "Built for",
    cell: (one) => one.builds.map((build) => `Python ${build.python} on ${build.machine}`).join(", "),
  },
  { title: "Size", kind: "number", cell: (one) => bytes(one.builds.reduce((sum, build) => sum + build.bytes, 0)) },
  { title: "Devices", kind: "number", cell: (one) => count(one.devices) },
  { title: "Pushed", kind: "nowrap", cell: (one) => moment(one.created_at) },
];
