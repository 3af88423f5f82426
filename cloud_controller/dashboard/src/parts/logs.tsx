// A device's recent log, versions and state, as it tells them when it is asked to.

import { useState } from "preact/hooks";
import { post } from "../data/api";
import { useResource } from "../data/resource";
import type { Bundle } from "../data/types";
import { moment } from "../format";
import { Panel, Problem } from "./notes";
import { type Column, Table } from "./table";

export function Logs({ name, own }: { name: string; own: (change: { kind: string; subject: string }) => boolean }) {
  const path = `/v1/devices/${encodeURIComponent(name)}/logs`;
  const { data, error, again } = useResource<Bundle[]>(path, own);
  const [failed, setFailed] = useState<Error | null>(null);
  const ask = () => {
    setFailed(null);
    post(path).then(again, (reason: Error) => setFailed(reason));
  };
  const problem = failed ?? error;
  const columns: readonly Column<Bundle>[] = [
    { title: "Asked", heads: true, kind: "nowrap", cell: (one) => moment(one.requested) },
    { title: "By", cell: (one) => `by ${one.who}` },
    { title: "State", cell: (one) => (one.reason === "" ? one.state : `${one.state}: ${one.reason}`) },
    {
      title: "Bundle",
      cell: (one) =>
        one.state === "complete" && (
          <a href={`${path}/${encodeURIComponent(one.id)}`} download={`${name}-${one.id}.json`}>
            Download
          </a>
        ),
    },
  ];
  return (
    <Panel title="Log bundles" note="recent log, versions and state, without secrets">
      {problem && <Problem error={problem} />}
      {data !== null && data.length > 0 && <Table bare columns={columns} rows={data} id={(one) => one.id} />}
      <button type="button" onClick={ask}>
        Ask for its log
      </button>
    </Panel>
  );
}
