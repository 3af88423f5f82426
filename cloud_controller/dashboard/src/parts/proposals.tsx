// Proposals of re-planning: the drift, the predicted gain of another table, and the operator's decision.

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
  const [pending, setPending] = useState<{ proposal: Proposal; verb: "accept" | "dismiss" } | null>(null);
  const proposals = proposalsOf(data ?? [], model);
  if (data !== null && proposals.length === 0) return null;
  return (
    <Panel title="Re-planning" note="other tables, proposed from what devices measured">
      {error && <Problem error={error} again={again} />}
      {proposals.slice(0, MOST_SHOWN).map((proposal) => (
        <ProposalPart key={proposal.id} proposal={proposal} onAsk={(verb) => setPending({ proposal, verb })} />
      ))}
      {proposals.length > MOST_SHOWN && (
        <p class="faint words">
          And {count(proposals.length - MOST_SHOWN)} older ones: edgectl rollout proposals --all
        </p>
      )}
      {pending !== null && (
        <Confirm
          title={`${pending.verb === "accept" ? "Accept" : "Dismiss"} proposal ${pending.proposal.id}?`}
          act={pending.verb === "accept" ? "Accept and roll out" : "Dismiss"}
          onAct={async () => {
            await post(`/v1/proposals/${pending.proposal.id}/${pending.verb}`);
            again();
          }}
          onClose={() => setPending(null)}
        >
          {consequences(pending.proposal, pending.verb).map((line) => (
            <p key={line}>{line}</p>
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
  const drift = drifted(proposal.drift);
  return (
    <>
      {drift.length > 0 && <Table columns={COLUMNS} rows={drift} id={(drift) => drift.quantity} />}
      <p class="words faint">
        Measured on {plural(proposal.measured_devices, "device")}{" "}
        {proposal.basis !== null && proposal.basis !== "measured" && <span class="mark">{proposal.basis}</span>} Current
        cuts: {cuts(proposal.rows)}. Proposed cuts: {cuts(proposal.proposed_rows)}.
      </p>
    </>
  );
}

function Decided({ proposal }: { proposal: Proposal }) {
  return (
    <p class="words faint">
      By {proposal.decided_by === "replan" ? "the controller itself" : (proposal.decided_by ?? NONE)},{" "}
      {moment(proposal.decided)}
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
  { title: "Quantity", heads: true, cell: (drift) => drift.quantity },
  { title: "Assumed by the plan", kind: "number", cell: (drift) => amount(drift.assumed, drift.unit) },
  { title: "Measured", kind: "number", cell: (drift) => amount(drift.measured, drift.unit) },
  { title: "Factor", kind: "number", cell: (drift) => times(drift.factor) },
];
