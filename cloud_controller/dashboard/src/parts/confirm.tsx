// Confirmation of an action, with its consequences or with the fields that it needs.

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { CloseButton, Dialog } from "./dialog";

interface Props {
  title: string;
  act: string;
  danger?: boolean;
  /** What stands there while it is being done, where that takes long. */
  busyText?: string;
  onAct: () => Promise<unknown>;
  onClose: () => void;
  children: ComponentChildren;
}

export function Confirm({ title, act, danger = false, busyText = "", onAct, onClose, children }: Props) {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<Error | null>(null);
  const go = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      await onAct();
      onClose();
    } catch (reason) {
      setError(reason as Error);
      setBusy(false);
    }
  };
  return (
    <Dialog title={title} onClose={onClose}>
      <form onSubmit={(event) => void go(event)}>
        <div class="words">{children}</div>
        {error !== null && (
          <p class="problem" role="alert">
            {error.message}
          </p>
        )}
        {busy && busyText !== "" && <p role="status">{busyText}</p>}
        <div class="actions">
          <CloseButton>Cancel</CloseButton>
          <button type="submit" class={danger ? "danger" : "primary"} disabled={busy}>
            {act}
          </button>
        </div>
      </form>
    </Dialog>
  );
}
