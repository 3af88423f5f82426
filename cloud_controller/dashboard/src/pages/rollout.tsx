export function RolloutPage({ id }: { id: string }) {
  return <h1>Rollout {id}</h1>;
}
