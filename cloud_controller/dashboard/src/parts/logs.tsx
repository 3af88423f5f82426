// Log bundles of a device: its recent log, versions and state, sent on request.

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
  const request = () => {
    setFailed(null);
    post(path).then(again, (reason: Error) => setFailed(reason));
  };
  const problem = failed ?? error;
  const columns: readonly Column<Bundle>[] = [
    { title: "Requested", heads: true, kind: "nowrap", cell: (bundle) => moment(bundle.requested) },
    { title: "By", cell: (bundle) => `by ${bundle.requested_by}` },
    { title: "State", cell: (bundle) => (bundle.reason === "" ? bundle.state : `${bundle.state}: ${bundle.reason}`) },
    {
      title: "Bundle",
      cell: (bundle) =>
        bundle.state === "complete" && (
          <a href={`${path}/${encodeURIComponent(bundle.id)}`} download={`${name}-${bundle.id}.json`}>
            Download
          </a>
        ),
    },
  ];
  return (
    <Panel title="Log bundles" note="recent log, versions and state, without secrets">
      {problem && <Problem error={problem} />}
      {data !== null && data.length > 0 && <Table bare columns={columns} rows={data} id={(bundle) => bundle.id} />}
      <button type="button" onClick={request}>
        Request a log bundle
      </button>
    </Panel>
  );
}
