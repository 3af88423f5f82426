import { clock, useCell } from "../data/cell";
import { useResource } from "../data/resource";
import { failed } from "../data/rollout";
import type { Rollout } from "../data/types";
import { age, count, short } from "../format";
import { Empty, Loading, Problem } from "../parts/notes";
import { Progress } from "../parts/progress";
import { Status } from "../parts/status";
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
      <div class="scroll">
        <table class="rollouts">
          <thead>
            <tr>
              <th scope="col">Rollout</th>
              <th scope="col">State</th>
              <th scope="col">Model</th>
              <th scope="col">To</th>
              <th scope="col">Stage</th>
              <th scope="col">Devices</th>
              <th scope="col" class="number">
                Failed
              </th>
              <th scope="col">By</th>
              <th scope="col" class="number">
                Made
              </th>
            </tr>
          </thead>
          <tbody>
            {data.toReversed().map((one) => (
              <tr key={one.id}>
                <th scope="row">
                  <a href={to("rollouts", String(one.id))}>{one.id}</a>
                </th>
                <td>
                  <Status state={one.state} />
                </td>
                <td class="nowrap">
                  {one.model} <code>{short(one.release)}</code>
                </td>
                <td class="targets">{one.targets.join(", ")}</td>
                <td class="nowrap">
                  {Math.max(one.stage, 0)} of {one.stages.length}
                </td>
                <td>
                  <Progress states={one.states} />
                </td>
                <td class={`number${failed(one) > 0 ? " bad" : ""}`}>{count(failed(one))}</td>
                <td>{one.who}</td>
                <td class="number">{age(one.created, now)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}
