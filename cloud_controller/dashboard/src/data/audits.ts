// What a cascade or still frames may change of the answers, in words: what was allowed beside what was measured.

import { count, NONE, percent, plural } from "../format";
import type { Audits, CascadeAudits, MeasuredShare, StillAudits } from "./types";

export interface AuditFact {
  name: string;
  text: string;
  /** Whether it needs a look: more than what is allowed was measured, or audits raised an alarm. */
  warns: boolean;
}

/** "3 of 412 audited differed (0.2 % to 1.9 %, 90 % sure)". */
export function measuredText(measured: MeasuredShare): string {
  const { audited, changed, at_least, at_most } = measured;
  if (at_least === null || at_most === null) return "none audited yet";
  return `${count(changed)} of ${count(audited)} audited differed (${percent(at_least, 1)} to ${percent(at_most, 1)}, 90 % sure)`;
}

/** "allowed 2 %, 3 of 412 audited differed …". */
export function promiseText(measured: MeasuredShare): string {
  return `allowed ${percent(measured.allowed, 1)}, ${measuredText(measured)}`;
}

/** Whether the audits show that more changes than is allowed. */
export function isBroken(measured: MeasuredShare): boolean {
  return measured.at_least !== null && measured.at_least > measured.allowed;
}

/** Each variant with its share of the answers, the most frequent first. */
export function answeredText(answered: Record<string, number>): string {
  const all = Object.values(answered).reduce((sum, number) => sum + number, 0);
  const sorted = Object.entries(answered).sort(([a, first], [b, second]) => second - first || (a < b ? -1 : 1));
  return sorted.map(([variant, number]) => `${variant} ${percent(number, all)}`).join(", ") || NONE;
}

export function factsOf(audits: Audits): AuditFact[] {
  return [
    ...(audits.cascade === null ? [] : cascadeFacts(audits.cascade)),
    ...(audits.still === null ? [] : stillFacts(audits.still)),
  ];
}

function cascadeFacts(cascade: CascadeAudits): AuditFact[] {
  const asked = cascade.sure + cascade.escalated + cascade.unsure;
  const threshold = cascade.threshold === null ? "everything" : `scores below ${thresholdText(cascade.threshold)}`;
  return [
    fact("who answers", answeredText(cascade.answered)),
    fact("escalated", `${percent(cascade.escalated, asked)} (${threshold})`, cascade.threshold === null),
    fact("unsure", `${plural(cascade.unsure, "answer")}, ${percent(cascade.unsure, asked)}`),
    fact("changed by the cascade", promiseText(cascade), isBroken(cascade)),
    ...auditFacts(cascade),
  ];
}

function stillFacts(still: StillAudits): AuditFact[] {
  return [
    fact("repeated", plural(still.repeated, "answer")),
    fact("changed by repeating", promiseText(still), isBroken(still)),
    ...auditFacts(still, " of still frames"),
  ];
}

function auditFacts(measured: MeasuredShare, of = ""): AuditFact[] {
  return [
    fact(`unaudited${of}`, plural(measured.unaudited, "frame")),
    fact(`alarms${of}`, count(measured.alarms), measured.alarms > 0),
  ];
}

function fact(name: string, text: string, warns = false): AuditFact {
  return { name, text, warns };
}

function thresholdText(threshold: number): string {
  return String(Number(threshold.toPrecision(4)));
}
