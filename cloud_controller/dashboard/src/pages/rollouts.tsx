import { clock, useCell } from "../data/cell";
import { useResource } from "../data/resource";
import { failed } from "../data/rollout";
import type { Rollout } from "../data/types";
import { age, count, short } from "../format";
import { Empty, Loading, Problem } from "../parts/notes";
import { Progress } from "../parts/progress";
import { MadeUp, Status } from "../parts/status";
import { type Column, Table } from "../parts/table";
import { to } from "../route";

export function RolloutsPage() {
  const { data, error, again } = useResource<Rollout[]>(
    "/v1/rollouts?newest=100",
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
      <Table name="rollouts" columns={columns(now)} rows={data.toReversed()} id={(one) => one.id} />
    </>
  );
}

function columns(now: number): readonly Column<Rollout>[] {
  return [
    { title: "Rollout", heads: true, cell: (one) => <a href={to("rollouts", String(one.id))}>{one.id}</a> },
    { title: "State", cell: (one) => <Status state={one.state} /> },
    {
      title: "Model",
      kind: "nowrap",
      cell: (one) => (
        <>
          {one.model} <code>{short(one.release)}</code>
        </>
      ),
    },
    { title: "To", kind: "targets", cell: (one) => one.targets.join(", ") },
    { title: "Stage", kind: "nowrap", cell: (one) => `${Math.max(one.stage, 0)} of ${one.stages.length}` },
    {
      title: "Devices",
      cell: (one) => (
        <>
          <Progress states={one.states} />
          <MadeUp emulated={one.emulated} simulated={one.simulated} />
        </>
      ),
    },
    {
      title: "Failed",
      kind: "number",
      cell: (one) => count(failed(one)),
      tone: (one) => (failed(one) > 0 ? "bad" : ""),
    },
    { title: "By", cell: (one) => one.who },
    { title: "Made", kind: "number", cell: (one) => age(one.created, now) },
  ];
}
