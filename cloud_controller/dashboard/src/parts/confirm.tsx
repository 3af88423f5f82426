// Confirmation of an action, with its consequences. A native dialog: it keeps the keyboard focus inside, and Escape
// cancels it.

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

interface Props {
  title: string;
  act: string;
  danger?: boolean;
  onAct: () => Promise<unknown>;
  onClose: () => void;
  children: ComponentChildren;
}

export function Confirm({ title, act, danger = false, onAct, onClose, children }: Props) {
  const dialog = useRef<HTMLDialogElement>(null);
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<Error | null>(null);
  useEffect(() => dialog.current?.showModal(), []);
  const go = async () => {
    setBusy(true);
    try {
      await onAct();
      onClose();
    } catch (reason) {
      setError(reason as Error);
      setBusy(false);
    }
  };
  return (
    <dialog ref={dialog} onClose={onClose} aria-labelledby="confirm-title">
      <h2 id="confirm-title">{title}</h2>
      <div class="words">{children}</div>
      {error !== null && (
        <p class="problem" role="alert">
          {error.message}
        </p>
      )}
      <div class="actions">
        <button type="button" onClick={() => dialog.current?.close()}>
          Cancel
        </button>
        <button type="button" class={danger ? "danger" : "primary"} disabled={busy} onClick={() => void go()}>
          {act}
        </button>
      </div>
    </dialog>
  );
}
