// Types of the controller's responses, as far as the pages read them.

export type State = "online" | "stale" | "offline" | "revoked" | "claimed";
export type Role = "viewer" | "operator" | "admin";

export interface Session {
  operator: string;
  role: Role;
  groups: string[] | null;
  csrf: string | null;
}

/** How many of a number of devices are emulated or simulated. */
export interface OriginCount {
  emulated: number;
  simulated: number;
}

export interface Component {
  name: string;
  subject: string;
  state: "good" | "bad" | "unknown";
  text: string;
  since: number | null;
  at: number | null;
  remedy: string;
}

export interface Drift {
  quantity: string;
  unit: string;
  assumed: number;
  measured: number;
  factor: number | null;
}

export interface ProposedRow {
  name: string;
  split_after: string;
  up_bytes: number;
}

export interface Proposal {
  id: number;
  state: string;
  model: string;
  release: string;
  device_class: string;
  group: string | null;
  devices: string[];
  created: number;
  decided: number | null;
  decided_by: string | null;
  result: string | null;
  reason: string;
  ended?: string;
  gain: number;
  gain_between: [number, number];
  broken_limits?: { now: number; then: number };
  measured_devices: number;
  basis: string | null;
  drift: Drift[];
  rows: ProposedRow[];
  proposed_rows: ProposedRow[];
}

/** Of a minute, an hour, a day or a month: sums, means and extremes. Of a device itself or of a model. */
export interface Bucket {
  at: number;
  span_s: number;
  requests?: number;
  failed?: number;
  fallbacks?: number;
  latency_p95_s?: number | null;
  latency_p95_worst_s?: number;
  device_s?: number | null;
  link_s?: number | null;
  remote_s?: number | null;
  predicted_s?: number | null;
  joules?: number | null;
  up_bytes_per_s?: number | null;
  rtt_s?: number | null;
  watts?: number | null;
  celsius_max?: number | null;
  /** Requests by the origin of their answers: `real`, `emulated`, `simulated`. */
  origins?: Record<string, number>;
  cascade?: { sure: number; escalated: number; unsure: number };
  /** Greatest share of answers that a cascade may change. */
  cascade_allowed_max?: number;
  /** What the audits of this bucket and of those before it show together. */
  cascade_measured?: Interval;
  still?: { repeated: number };
  still_allowed_max?: number;
  still_measured?: Interval;
}

/** A measured share, and between which shares the truth lies, 90 % sure; null before the first audit. */
export interface Interval {
  audited: number;
  changed: number;
  share: number | null;
  at_least: number | null;
  at_most: number | null;
}

/** A bucket of the whole fleet. */
export interface FleetBucket extends Bucket {
  /** Devices that sent telemetry in it. */
  devices: number;
}

export interface FleetTrend {
  span: string;
  buckets: FleetBucket[];
}

export interface DeviceHistory {
  device: string;
  span: string;
  buckets: Record<string, Bucket[]>;
}

export interface ModelHistory {
  model: string;
  span: string;
  buckets: Bucket[];
}

export interface Cause {
  cause: string;
  detail: string;
}

export interface FleetModel {
  model: string;
  release: string;
  desired_release: string;
  state: string;
  row: string;
  detail: string;
}

export interface FleetRow {
  name: string;
  state: State;
  group: string;
  labels: Record<string, string>;
  class: string;
  emulated: boolean;
  simulated: boolean;
  version: string;
  last_seen: number | null;
  models: FleetModel[];
  p95_s: number | null;
  requests: number;
  failed: number;
  fallbacks: number;
  remote_usable: boolean | null;
  celsius: number | null;
  causes: Cause[];
}

export interface Fleet {
  now: number;
  stale_after_s: number;
  devices: FleetRow[];
  /** `name@version` by digest: devices name models without their versions. */
  releases: Record<string, string>;
}

export interface Window {
  model: string;
  release: string;
  row: string;
  requests: number;
  failed: number;
  fallbacks: number;
  switches: number;
  emulation_overruns: number;
  up_bytes: number;
  latency_p50_s: number;
  latency_p95_s: number;
  predicted_s: number;
  device_s: number;
  link_s: number;
  remote_s: number;
  joules?: number;
  joules_basis?: string;
  problem?: string;
  /** Why the row of the last request was chosen, as one sentence of the agent. */
  reason?: string;
}

export interface PowerSeen {
  mode?: string;
  mode_reason?: string;
  watts?: number | null;
  watts_source?: string;
  battery_percent?: number | null;
  celsius?: number | null;
  clock_ratio?: number | null;
  under_voltage?: boolean;
}

export interface MachineSeen {
  disk_free_bytes?: number | null;
  disk_bytes?: number | null;
  memory_free_bytes?: number | null;
  memory_bytes?: number | null;
}

export interface Telemetry {
  at: number;
  emulated: boolean;
  up_bytes_per_s: number;
  rtt_s: number;
  remote_usable: boolean;
  models: Window[];
  power?: PowerSeen | null;
  machine?: MachineSeen | null;
}

export interface ModelState {
  model: string;
  release: string;
  desired_release: string;
  state: string;
  /** The last reported state, where it may no longer be current. */
  last_state?: string;
  current?: boolean;
  detail: string;
}

export interface Condition {
  kind: string;
  since: number;
  text: string;
  remedy: string;
  current: boolean;
}

export interface Difference {
  model: string;
  desired: string;
  running: string;
  kind: string;
  detail: string;
}

export interface Bundle {
  id: string;
  requested_by: string;
  requested: number;
  state: string;
  reason: string;
  total: number;
  received: number;
}

export interface Keys {
  roles: { role: string; threshold?: number; expires?: string | number }[];
  notices: string[];
}

export interface Device {
  name: string;
  state: State;
  device_class: string;
  group: string;
  labels: Record<string, string>;
  link: string;
  copied?: number | null;
  flooded?: { at: number; held_until: number; dropped: number } | null;
  enrolled?: number;
  expires?: number;
  last_seen: number | null;
  session: number | null;
  emulated: boolean;
  simulated?: boolean;
  agent_version?: string | null;
  /** The address of its agent's endpoint for applications, as it reported it. */
  local_url?: string | null;
  counter?: number;
  acted_upon?: number | null;
  desired: { model: string; release: string; deployment: number }[];
  models: ModelState[];
  safe_mode?: string;
  statement_problem?: string;
  telemetry: Telemetry | null;
  /** Its last measurements, however old. */
  last_telemetry?: Telemetry | null;
  conditions?: Condition[];
  differences?: Difference[];
  /** Of the releases that it runs, as far as they have a cascade or repeat answers. */
  audits?: DeviceAudits[];
  gateway?: string | null;
}

/** Audited answers, those of them that differed, and between which shares the truth lies, 90 % sure. */
export interface MeasuredShare extends Interval {
  /** The share of answers that may change. */
  allowed: number;
  unaudited: number;
  alarms: number;
}

export interface CascadeAudits extends MeasuredShare {
  sure: number;
  escalated: number;
  unsure: number;
  /** Answers below this score are escalated; null: all are. */
  threshold: number | null;
  /** Answers by variant. */
  answered: Record<string, number>;
}

export interface StillAudits extends MeasuredShare {
  repeated: number;
}

/** What was counted of answers that may have changed, since the release first ran. */
export interface Audits {
  cascade: CascadeAudits | null;
  still: StillAudits | null;
}

export interface DeviceAudits extends Audits {
  model: string;
  release: string;
}

/** Sums over all devices. */
export interface FleetAudits extends Audits {
  audited_devices: number;
}

/** The cascade in a release's plan for one device class. */
export interface PlannedCascade {
  device_class: string;
  first: string;
  second: string;
  score: string;
  threshold: number;
  escalated: number;
  /** In words. */
  promise: string;
}

/** A variant of a family. */
export interface FamilyVariant {
  name: string;
  model: string;
  samples: number;
  /** The variant that `accuracy` is agreement with, where samples have no labels; empty: they have. */
  reference: string;
  accuracy: Accuracy;
}

export interface Link {
  up_bytes_per_s: number;
  down_bytes_per_s: number;
  rtt_s: number;
  name: string;
}

export interface CurveRow {
  name: string;
  split_after: string;
  local: boolean;
  codecs: string[];
  compress: boolean;
  loss: number;
  up_bytes: number;
  device_s: number;
  link_s: number;
  remote_s: number;
  total_s: number;
  line: number[];
}

export interface Curves {
  model: string;
  device_class: string;
  objective: string;
  unit: string;
  basis: string;
  fallback: string;
  limits: Record<string, string>;
  tiers: string[];
  link: Link;
  rtt_s: number;
  up_bytes_per_s: number[];
  best: string[];
  rows: CurveRow[];
  gain: { best: string; over_local: number | null; over_remote: number | null };
}

export interface DeviceCurves {
  model: string;
  release: string;
  curves: Curves;
  now: { up_bytes_per_s: number; rtt_s: number; row: string; seconds: number | null; at: number } | null;
}

export interface Model {
  model: string;
  name: string;
  version: number;
  bytes: number;
  sha256: string;
  input: string | null;
  created_at: number;
  layers: number | { name: string }[];
  inputs?: { name: string; shape: unknown; dtype?: string }[];
  outputs?: { name: string; shape: unknown; dtype?: string }[];
  format?: string;
  /** Of a family, its document. */
  family?: object | null;
}

export interface ReleaseView extends OriginCount {
  release: string;
  created: number;
  devices: number;
  encrypted: boolean;
  recut_of: string;
  slices: number;
  bytes: number;
  plans: Curves[];
  cascades: PlannedCascade[];
  audits: FleetAudits | null;
}

/** A share of right answers, with its interval. */
export interface Accuracy {
  share: number;
  at_least: number;
  at_most: number;
}

/** A version that stands in for another, by what its samples showed. */
export interface Variant {
  model: string;
  bytes: number;
  method: string;
  samples: number;
  changed_at_most: number;
  accuracy: Accuracy | null;
  accuracy_base: Accuracy | null;
}

export interface ModelView extends Model {
  /** Where it comes from, if it stands in for another version. */
  lineage?: { base: string; sentences: string[] };
  /** The versions that stand in for the same one. */
  variants: Variant[];
  /** The variants of a family; null for a model. */
  family: FamilyVariant[] | null;
  releases: ReleaseView[];
}

/** A one-time claim, as the device reads it: `token` is a secret. */
export interface Claim {
  device: string;
  device_class: string;
  token: string;
  expires: number;
}

export interface Deployed {
  release: string;
  devices: string[];
  deployment?: number | null;
}

/** The devices that lose a model, each with what it runs. Without `rollout` nothing was done. */
export interface Undeployed {
  rollout: number | null;
  model: string;
  devices: { device: string; release: string; model: string; state: string }[];
  supersedes: { rollout: number; devices: number }[];
}

export interface Event {
  id: number;
  at: number;
  actor: string;
  action: string;
  subject: string;
  detail: Record<string, unknown>;
}

export interface Stage extends OriginCount {
  number: number;
  size: string;
  devices: number;
  began: number | null;
  states: Record<string, number>;
  succeeded: number;
  failures: number;
  open: number;
  needs_approval: boolean;
}

export interface Failure {
  kind: string;
  count: number;
  example: string;
  devices: string[];
}

export interface Rollout extends OriginCount {
  id: number;
  state: string;
  reason: string;
  waits_for: string;
  /** Devices that it waits for and that are offline. */
  offline: number;
  /** It is an undeployment: it removes the model, and its release is `nothing`. */
  withdraws: boolean;
  model: string;
  release: string;
  targets: string[];
  created_by: string;
  created: number;
  began: number | null;
  ended: number | null;
  following: boolean;
  superseded_by: number | null;
  stage: number;
  devices: number;
  states: Record<string, number>;
  stages: Stage[];
  failures: Failure[];
  terms: Record<string, unknown>;
}

export interface RolloutDevice {
  device: string;
  emulated: boolean;
  simulated: boolean;
  position: number;
  stage: number;
  state: string;
  cause: string;
  kind: string;
  previous: string | null;
  assigned_at: number | null;
  ran_at: number | null;
  rolls_back: boolean;
  online: boolean;
  last_seen: number | null;
}
