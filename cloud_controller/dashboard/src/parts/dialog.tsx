// A native dialog: it keeps the keyboard focus inside, and Escape closes it.

import type { ComponentChildren } from "preact";
import { useEffect, useId, useRef } from "preact/hooks";

export function Dialog({
  title,
  onClose,
  children,
}: {
  title: string;
  onClose: () => void;
  children: ComponentChildren;
}) {
  const dialog = useRef<HTMLDialogElement>(null);
  const id = useId();
  useEffect(() => dialog.current?.showModal(), []);
  return (
    <dialog ref={dialog} onClose={onClose} aria-labelledby={id}>
      <h2 id={id}>{title}</h2>
      {children}
    </dialog>
  );
}

/** Closes the dialog that it stands in. */
export function CloseButton({ children }: { children: ComponentChildren }) {
  return (
    <button type="button" onClick={(event) => event.currentTarget.closest("dialog")?.close()}>
      {children}
    </button>
  );
}
