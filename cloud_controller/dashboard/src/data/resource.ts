// One answer of the API on a page: read, read again when what it is about changed, and kept while a newer one comes.

import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { get } from "./api";
import { EVERYTHING, onChanges, type Subject } from "./live";

export interface Resource<T> {
  data: T | null;
  error: Error | null;
  again: () => void;
}

/** Least milliseconds between two readings: a change a millisecond must not become a call a millisecond. */
const REST = 1_000;

/** `about`: is this a change of what is shown? `everyS`: read again so often besides, while the page is looked at. */
export function useResource<T>(path: string | null, about: (change: Subject) => boolean, everyS?: number): Resource<T> {
  const [data, setData] = useState<T | null>(null);
  const [error, setError] = useState<Error | null>(null);
  const relevant = useRef(about);
  relevant.current = about;
  const [asked, setAsked] = useState(0);
  const again = useCallback(() => setAsked((count) => count + 1), []);

  // `asked` is what makes it read again
  useEffect(() => {
    if (path === null) return;
    const aborted = new AbortController();
    get<T>(path, aborted.signal).then(
      (answer) => {
        setData(answer);
        setError(null);
      },
      (reason: Error) => {
        if (!aborted.signal.aborted) setError(reason);
      },
    );
    return () => aborted.abort();
  }, [path, asked]);

  // another path is another thing to show
  useEffect(() => {
    setData(null);
    setError(null);
  }, [path]);

  useEffect(() => {
    let waiting: ReturnType<typeof setTimeout> | undefined;
    const stop = onChanges((changes) => {
      if (waiting === undefined && changes.some((one) => one.kind === EVERYTHING || relevant.current(one))) {
        waiting = setTimeout(
          () => {
            waiting = undefined;
            again();
          },
          REST * (0.3 + Math.random()),
        );
      }
    });
    return () => {
      stop();
      clearTimeout(waiting);
    };
  }, [again]);

  useEffect(() => {
    if (everyS === undefined) return;
    const timer = setInterval(() => document.visibilityState === "visible" && again(), 1_000 * everyS);
    return () => clearInterval(timer);
  }, [everyS, again]);

  return { data, error, again };
}
