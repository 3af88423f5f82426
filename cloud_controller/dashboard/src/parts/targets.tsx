// Fields for a rollout's devices and stages.

import { useFleet } from "../data/fleet";
import { TextField } from "./fields";

const STAGES = ["", "1, 10%, 100%", "10%, 100%"];

interface Props {
  value: string;
  onChange: (value: string) => void;
}

export function TargetsField({ value, onChange }: Props) {
  const fleet = useFleet();
  const groups = [...new Set(fleet.rows.map((row) => row.group))].filter(Boolean).map((group) => `group=${group}`);
  return (
    <TextField
      label="Devices"
      value={value}
      onChange={onChange}
      required
      offered={["all", ...groups]}
      hint="all, names, group=NAME or label=VALUE; several with commas."
    />
  );
}

export function StagesField({ value, onChange }: Props) {
  return (
    <TextField
      label="Stages"
      value={value}
      onChange={onChange}
      offered={STAGES}
      placeholder="all at once"
      hint="Numbers or shares of devices, as in 1, 10%, 100%. Each waits for the one before."
    />
  );
}

export function listed(text: string, between: RegExp): string[] {
  return text.trim().split(between).filter(Boolean);
}
