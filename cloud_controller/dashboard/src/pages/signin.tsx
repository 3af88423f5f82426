import { useState } from "preact/hooks";
import { signIn } from "../data/session";
import { ThemeSwitch } from "../parts/theme";

export function SignInPage({ failed }: { failed: Error | null }) {
  const [token, setToken] = useState("");
  const [error, setError] = useState<Error | null>(failed);
  const [busy, setBusy] = useState(false);
  const go = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      await signIn({ token: token.trim() });
    } catch (reason) {
      setError(reason as Error);
    }
    setBusy(false);
  };
  return (
    <main class="signin" id="main">
      <h1>edgesplit</h1>
      <p>
        <code>edgectl dashboard</code> opens this page with a code that signs you in once. Or give your operator's
        token:
      </p>
      <form onSubmit={(event) => void go(event)}>
        <label for="token">Token</label>
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
