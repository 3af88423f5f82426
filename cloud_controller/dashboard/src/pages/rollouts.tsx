export function RolloutsPage() {
  return <h1>Rollouts</h1>;
}
