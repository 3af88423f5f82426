// The controller itself: version, keys and what they wait for.

import { useResource } from "../data/resource";
import { Loading, Panel, Problem } from "../parts/notes";

interface Health {
  status: string;
  version: string;
}

export function SystemPage() {
  const { data, error, again } = useResource<Health>("/v1/health", () => false);
  if (data === null) return error ? <Problem error={error} again={again} /> : <Loading />;
  return (
    <>
      <h1>System</h1>
      <Panel title="Controller">
        <dl class="figures">
          <div>
            <dt>status</dt>
            <dd>{data.status}</dd>
          </div>
          <div>
            <dt>version</dt>
            <dd>{data.version}</dd>
          </div>
        </dl>
      </Panel>
    </>
  );
}
