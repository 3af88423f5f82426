// A response of the API on a page: fetched, fetched again when its subject changes, and shown until the newer one arrives.

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

/** `about`: whether a change concerns what is shown. `everyS`: also fetched at this interval while the page is visible. */
export function useResource<T>(path: string | null, about: (change: Subject) => boolean, everyS?: number): Resource<T> {
  const [data, setData] = useState<T | null>(null);
  const [error, setError] = useState<Error | null>(null);
  const relevant = useRef(about);
  relevant.current = about;
  const [attempt, setAttempt] = useState(0);
  const again = useCallback(() => setAttempt((count) => count + 1), []);

  // a new `attempt` fetches it again
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
  }, [path, attempt]);

  // another path is another thing to show
  useEffect(() => {
    setData(null);
    setError(null);
  }, [path]);

  useEffect(() => {
    let waiting: ReturnType<typeof setTimeout> | undefined;
    const stop = onChanges((changes) => {
      if (waiting === undefined && changes.some((change) => change.kind === EVERYTHING || relevant.current(change))) {
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
