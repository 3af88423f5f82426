// Deploying a model that was pushed: plans, signs and begins a rollout, which the page then shows.

import { useState } from "preact/hooks";
import { post } from "../data/api";
import type { Deployed } from "../data/types";
import { to } from "../route";
import { Confirm } from "./confirm";
import { TextField } from "./fields";
import { listed, StagesField, TargetsField } from "./targets";

const PARTITIONS = ["auto", "device", "cloud"];

export function DeployButton({ model }: { model: string }) {
  const [asking, setAsking] = useState(false);
  return (
    <>
      <button type="button" class="primary" onClick={() => setAsking(true)}>
        Deploy
      </button>
      {asking && <AskForTargets model={model} onClose={() => setAsking(false)} />}
    </>
  );
}

function AskForTargets({ model, onClose }: { model: string; onClose: () => void }) {
  const [targets, setTargets] = useState("all");
  const [partition, setPartition] = useState("auto");
  const [stages, setStages] = useState("");
  const deploy = async () => {
    const made = await post<Deployed>("/v1/deployments", {
      model,
      to: listed(targets, /[\s,]+/),
      partition: partition.trim(),
      rollout: { stages: listed(stages, /\s*,\s*/) },
    });
    location.hash = made.deployment ? to("rollouts", String(made.deployment)) : to("rollouts");
  };
  return (
    <Confirm
      title={`Deploy ${model}`}
      act="Plan, sign and roll out"
      busyText="Planning and signing; this may take a minute…"
      onAct={deploy}
      onClose={onClose}
    >
      <TargetsField value={targets} onChange={setTargets} />
      <TextField
        label="Partition"
        value={partition}
        onChange={setPartition}
        required
        offered={PARTITIONS}
        hint="auto plans every cut for each class; device or cloud keep it whole; or the last layer on the device."
      />
      <StagesField value={stages} onChange={setStages} />
    </Confirm>
  );
}
