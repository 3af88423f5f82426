import { useState } from "preact/hooks";
import { signIn } from "../data/session";
import { ThemeSwitch } from "../parts/theme";

/** The code itself, or the address that it stands in. An operator's token is good too, where the browser shows the
 *  operator's certificate. */
export function secretIn(text: string): string {
  return text.trim().replace(/^.*#login=/, "");
}

export function SignInPage({ failed }: { failed: Error | null }) {
  const [token, setToken] = useState("");
  const [error, setError] = useState<Error | null>(failed);
  const [busy, setBusy] = useState(false);
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
