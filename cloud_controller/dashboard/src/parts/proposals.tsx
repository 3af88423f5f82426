// Plans that grew old: what drifted, what another table is predicted to bring, and an operator's word on it.

import { useState } from "preact/hooks";
import { post } from "../data/api";
import { amount, consequences, cuts, drifted, gain, proposalsOf } from "../data/proposals";
import { useResource } from "../data/resource";
import { may } from "../data/session";
import type { Drift, Proposal } from "../data/types";
import { count, moment, NONE, plural, short, times } from "../format";
import { to } from "../route";
import { Confirm } from "./confirm";
import { Panel, Problem } from "./notes";
import { Status } from "./status";
import { type Column, Table } from "./table";

const MOST_SHOWN = 6;

export function Proposals({ model }: { model: string }) {
  const { data, error, again } = useResource<Proposal[]>(
    "/v1/proposals",
    (change) => change.kind === "model" || change.kind === "rollout",
  );
  const [asking, setAsking] = useState<{ proposal: Proposal; verb: "accept" | "dismiss" } | null>(null);
  const found = proposalsOf(data ?? [], model);
  if (data !== null && found.length === 0) return null;
  return (
    <Panel title="Re-planning" note="other tables, proposed from what devices measured">
      {error && <Problem error={error} again={again} />}
      {found.slice(0, MOST_SHOWN).map((one) => (
        <ProposalPart key={one.id} proposal={one} onAsk={(verb) => setAsking({ proposal: one, verb })} />
      ))}
      {found.length > MOST_SHOWN && (
        <p class="faint words">And {count(found.length - MOST_SHOWN)} older ones: edgectl rollout proposals --all</p>
      )}
      {asking !== null && (
        <Confirm
          title={`${asking.verb === "accept" ? "Accept" : "Dismiss"} proposal ${asking.proposal.id}?`}
          act={asking.verb === "accept" ? "Accept and roll out" : "Dismiss"}
          onAct={async () => {
            await post(`/v1/proposals/${asking.proposal.id}/${asking.verb}`);
            again();
          }}
          onClose={() => setAsking(null)}
        >
          {consequences(asking.proposal, asking.verb).map((one) => (
            <p key={one}>{one}</p>
          ))}
        </Confirm>
      )}
    </Panel>
  );
}

function ProposalPart({ proposal, onAsk }: { proposal: Proposal; onAsk: (verb: "accept" | "dismiss") => void }) {
  const open = proposal.state === "open";
  return (
    <article class="proposal" aria-label={`Proposal ${proposal.id}`}>
      <div class="head">
        <h3>Proposal {proposal.id}</h3>
        <Status state={proposal.state} />
        <span>
          {proposal.device_class}
          {proposal.group !== null && ` · group ${proposal.group}`} · {plural(proposal.devices.length, "device")}
        </span>
        <span class="faint">{moment(proposal.created)}</span>
        {open && may("operator") && (
          <div class="actions">
            <button type="button" class="primary" onClick={() => onAsk("accept")}>
              Accept
            </button>
            <button type="button" onClick={() => onAsk("dismiss")}>
              Dismiss
            </button>
          </div>
        )}
      </div>
      <p class="words">
        {proposal.reason}. <span class="mark plain">predicted</span> {gain(proposal)}.
      </p>
      {open ? <Drifted proposal={proposal} /> : <Decided proposal={proposal} />}
    </article>
  );
}

function Drifted({ proposal }: { proposal: Proposal }) {
  const found = drifted(proposal.drift);
  return (
    <>
      {found.length > 0 && <Table columns={COLUMNS} rows={found} id={(one) => one.what} />}
      <p class="words faint">
        Heard of {plural(proposal.heard, "device")}{" "}
        {proposal.basis !== null && proposal.basis !== "measured" && <span class="mark">{proposal.basis}</span>} Cuts
        now: {cuts(proposal.rows)}. Proposed: {cuts(proposal.proposed_rows)}.
      </p>
    </>
  );
}

function Decided({ proposal }: { proposal: Proposal }) {
  return (
    <p class="words faint">
      By {proposal.who === "replan" ? "the controller itself" : (proposal.who ?? NONE)}, {moment(proposal.decided)}
      {proposal.result !== null && (
        <>
          : release <code>{short(proposal.result)}</code>, see <a href={to("rollouts")}>rollouts</a>
        </>
      )}
      {proposal.ended !== undefined && `: ${proposal.ended}`}
    </p>
  );
}

const COLUMNS: readonly Column<Drift>[] = [
  { title: "What drifted", heads: true, cell: (one) => one.what },
  { title: "The plan assumed", kind: "number", cell: (one) => amount(one.assumed, one.unit) },
  { title: "Measured", kind: "number", cell: (one) => amount(one.measured, one.unit) },
  { title: "Factor", kind: "number", cell: (one) => times(one.factor) },
];
