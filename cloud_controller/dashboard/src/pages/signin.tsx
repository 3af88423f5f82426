import { useEffect, useState } from "preact/hooks";
import { secretIn } from "../data/login";
import { signIn } from "../data/session";
import { ThemeSwitch } from "../parts/theme";

/** `failed`: why the code in the page's address did not sign in, which may be known only after the page is shown. */
export function SignInPage({ failed }: { failed: Error | null }) {
  const [token, setToken] = useState("");
  const [error, setError] = useState<Error | null>(null);
  const [busy, setBusy] = useState(false);
  useEffect(() => setError(failed), [failed]);
  const go = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      await signIn(secretIn(token));
    } catch (reason) {
      setError(reason as Error);
    }
    setBusy(false);
  };
  return (
    <main class="signin" id="main">
      <h1>edgesplit</h1>
      <p>
        Type <code>edgectl dashboard</code> in a terminal: it opens this page and signs you in. From another machine,
        give the address or the code that it prints, within two minutes:
      </p>
      <form onSubmit={(event) => void go(event)}>
        <label for="token">Code</label>
        <input
          id="token"
          type="password"
          autocomplete="current-password"
          spellcheck={false}
          required
          value={token}
          onInput={(event) => setToken(event.currentTarget.value)}
        />
        <button type="submit" class="primary" disabled={busy}>
          Sign in
        </button>
      </form>
      {error !== null && (
        <p class="problem" role="alert">
          {error.message}
        </p>
      )}
      <ThemeSwitch />
    </main>
  );
}
