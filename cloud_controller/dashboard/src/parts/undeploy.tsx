// Undeploying a model: first the devices that it concerns are asked for and shown, then a rollout removes it from them.

import { useState } from "preact/hooks";
import { post } from "../data/api";
import type { Undeployed } from "../data/types";
import { undeploymentLines } from "../data/undeployment";
import { plural } from "../format";
import { to } from "../route";
import { Confirm } from "./confirm";
import { CloseButton, Dialog } from "./dialog";
import { Problem } from "./notes";
import { listed, StagesField, TargetsField } from "./targets";

interface Request {
  model: string;
  targets: string[];
  rollout: { stages: string[] };
}

interface Preview {
  request: Request;
  undeployed: Undeployed;
}

/** With a device, from that device; else the devices are asked for. */
export function UndeployButton({ model, device }: { model: string; device?: string }) {
  const [asking, setAsking] = useState(false);
  const [preview, setPreview] = useState<Preview | null>(null);
  const [error, setError] = useState<Error | null>(null);
  const show = async (targets: string[], stages: string[]) => {
    const request = { model, targets, rollout: { stages } };
    setPreview({ request, undeployed: await post<Undeployed>("/v1/undeployments", { ...request, dry_run: true }) });
  };
  return (
    <>
      <button
        type="button"
        onClick={() => (device === undefined ? setAsking(true) : void show([device], []).catch(setError))}
      >
        Undeploy{device !== undefined && <span class="hidden"> {model}</span>}
      </button>
      {asking && <AskForTargets model={model} onShow={show} onClose={() => setAsking(false)} />}
      {preview !== null && <ConfirmUndeployment {...preview} onClose={() => setPreview(null)} />}
      {error !== null && (
        <Dialog title={`Undeploy ${model}`} onClose={() => setError(null)}>
          <Problem error={error} />
          <div class="actions">
            <CloseButton>Close</CloseButton>
          </div>
        </Dialog>
      )}
    </>
  );
}

interface AskProps {
  model: string;
  onShow: (targets: string[], stages: string[]) => Promise<void>;
  onClose: () => void;
}

function AskForTargets({ model, onShow, onClose }: AskProps) {
  const [targets, setTargets] = useState("");
  const [stages, setStages] = useState("");
  return (
    <Confirm
      title={`Undeploy ${model}`}
      act="Show what ends"
      onAct={() => onShow(listed(targets, /[\s,]+/), listed(stages, /\s*,\s*/))}
      onClose={onClose}
    >
      <TargetsField value={targets} onChange={setTargets} />
      <StagesField value={stages} onChange={setStages} />
    </Confirm>
  );
}

function ConfirmUndeployment({ request, undeployed, onClose }: Preview & { onClose: () => void }) {
  const undeploy = async () => {
    const { rollout } = await post<Undeployed>("/v1/undeployments", request);
    location.hash = to("rollouts", String(rollout));
  };
  return (
    <Confirm
      title={`Undeploy ${undeployed.model} from ${plural(undeployed.devices.length, "device")}?`}
      act="Undeploy"
      danger
      onAct={undeploy}
      onClose={onClose}
    >
      {undeploymentLines(undeployed, request.rollout.stages).map((line) => (
        <p key={line}>{line}</p>
      ))}
    </Confirm>
  );
}
