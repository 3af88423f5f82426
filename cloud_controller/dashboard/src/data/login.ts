// What an operator pastes to sign in: a one-time code, the address that it stands in, or a token.

/** The one-time code in an address, with which `edgectl dashboard` opens the page. */
export function loginCode(hash: string): string | null {
  return new URLSearchParams(hash.replace(/^#\/?/, "")).get("login");
}

/** The code itself, or the address that it stands in. An operator's token is good too, where the browser shows the
 *  operator's certificate. */
export function secretIn(text: string): string {
  return text.trim().replace(/^.*#\/?login=/, "");
}

/** A token needs the browser to show a certificate too. Anything else is taken for a code, so that a misspelt one is
 *  called that. */
export function isToken(secret: string): boolean {
  return secret.startsWith("edgesplit_op_");
}
