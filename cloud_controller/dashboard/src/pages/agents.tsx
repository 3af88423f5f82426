// Versions of the agent itself: the page that a row of `edgesplit-agent` on a device or a rollout links to.

import { useResource } from "../data/resource";
import { bytes, count, moment } from "../format";
import { Empty, Loading, Problem } from "../parts/notes";
import { type Column, Table } from "../parts/table";

/** Name of the agent's releases where models are listed; no model may have it. */
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

/** `reference`: the version to mark, as in edgesplit-agent@3; without a number none is marked. */
export function AgentsPage({ reference }: { reference: string }) {
  const { data, error, again } = useResource<AgentVersion[]>("/v1/agents", (change) => change.kind === "model", 30);
  if (data === null) return error ? <Problem error={error} again={again} /> : <Loading />;
  return (
    <>
      <h1>Versions of the agent</h1>
      {error && <Problem error={error} again={again} />}
      {data.length === 0 ? (
        <Empty command="edgectl agent push KIT">No version of the agent has been pushed yet.</Empty>
      ) : (
        <Table
          columns={COLUMNS}
          rows={data.toReversed()}
          id={(version) => version.model}
          marked={(version) => version.model === reference}
        />
      )}
    </>
  );
}

const COLUMNS: readonly Column<AgentVersion>[] = [
  { title: "Version", heads: true, cell: (version) => version.version },
  { title: "Reference", kind: "faint", cell: (version) => version.model },
  {
    title: "Built for",
    cell: (version) => version.builds.map((build) => `Python ${build.python} on ${build.machine}`).join(", "),
  },
  {
    title: "Size",
    kind: "number",
    cell: (version) => bytes(version.builds.reduce((sum, build) => sum + build.bytes, 0)),
  },
  { title: "Devices", kind: "number", cell: (version) => count(version.devices) },
  { title: "Pushed", kind: "nowrap", cell: (version) => moment(version.created_at) },
];
