// The signed-in operator. The session itself is a cookie that scripts cannot read.

import { call, get, Refused, useCsrf, whenSignedOut } from "./api";
import { Cell } from "./cell";
import { forgetFleet } from "./fleet";
import { follow, unfollow } from "./live";
import { isToken } from "./login";
import type { Session } from "./types";

/** undefined: not known yet; null: signed out. */
export const session = new Cell<Session | null | undefined>(undefined);

export async function resume(): Promise<void> {
  whenSignedOut(() => signedOut());
  try {
    signedIn(await get<Session>("/v1/session"));
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    signedOut();
  }
}

/** With a one-time code of `edgectl dashboard`, or with an operator's token in a browser that shows the operator's
 *  certificate. */
export async function signIn(secret: string): Promise<void> {
  const byToken = isToken(secret);
  const body = byToken ? {} : { code: secret };
  signedIn(await call<Session>("POST", "/v1/session", body, byToken ? { token: secret } : {}));
}

export async function signOut(): Promise<void> {
  try {
    await call("DELETE", "/v1/session");
  } finally {
    signedOut();
  }
}

export function may(role: "operator" | "admin"): boolean {
  const mine = session.value?.role;
  return mine === "admin" || mine === role;
}

function signedIn(who: Session): void {
  useCsrf(who.csrf ?? "");
  session.value = who;
  follow();
}

function signedOut(): void {
  useCsrf("");
  unfollow();
  forgetFleet();
  session.value = null;
}
