import { clock, useCell } from "../data/cell";
import { useResource } from "../data/resource";
import { failed, releaseText } from "../data/rollout";
import type { Rollout } from "../data/types";
import { age, count } from "../format";
import { Empty, Loading, Problem } from "../parts/notes";
import { Progress } from "../parts/progress";
import { OriginCounts, Status } from "../parts/status";
import { type Column, Table } from "../parts/table";
import { to } from "../route";

const NEWEST = 100;

export function RolloutsPage() {
  const { data, error, again } = useResource<Rollout[]>(
    `/v1/rollouts?newest=${NEWEST}`,
    (change) => change.kind === "rollout",
  );
  const now = useCell(clock);
  if (data === null) return error ? <Problem error={error} again={again} /> : <Loading />;
  if (data.length === 0) {
    return (
      <Empty command="edgectl deploy MODEL --partition auto --to group=cameras --canary 10% --then 100%">
        Nothing has been rolled out yet. A rollout begins with a deployment:
      </Empty>
    );
  }
  return (
    <>
      <h1>Rollouts</h1>
      {error && <Problem error={error} again={again} />}
      <Table name="rollouts" columns={columns(now)} rows={data.toReversed()} id={(rollout) => rollout.id} />
      {data.length >= NEWEST && (
        <p class="note">
          The newest {NEWEST}; <code>edgectl rollout list</code> shows all.
        </p>
      )}
    </>
  );
}

function columns(now: number): readonly Column<Rollout>[] {
  return [
    { title: "Rollout", heads: true, cell: (rollout) => <a href={to("rollouts", String(rollout.id))}>{rollout.id}</a> },
    { title: "State", cell: (rollout) => <Status state={rollout.state} /> },
    {
      title: "Model",
      kind: "nowrap",
      cell: (rollout) => (
        <>
          {rollout.model} {rollout.withdraws ? releaseText(rollout) : <code>{releaseText(rollout)}</code>}
        </>
      ),
    },
    { title: "Targets", kind: "targets", cell: (rollout) => rollout.targets.join(", ") },
    { title: "Stage", kind: "nowrap", cell: (rollout) => `${Math.max(rollout.stage, 0)} of ${rollout.stages.length}` },
    {
      title: "Devices",
      cell: (rollout) => (
        <>
          <Progress states={rollout.states} />
          <OriginCounts emulated={rollout.emulated} simulated={rollout.simulated} />
          {rollout.offline > 0 && <div class="faint">waits for {count(rollout.offline)} offline</div>}
        </>
      ),
    },
    {
      title: "Failed",
      kind: "number",
      cell: (rollout) => count(failed(rollout)),
      tone: (rollout) => (failed(rollout) > 0 ? "bad" : ""),
    },
    { title: "Created by", cell: (rollout) => rollout.created_by },
    { title: "Age", kind: "number", cell: (rollout) => age(rollout.created, now) },
  ];
}
