// Text of the controller, in which commands stand between backticks.

export function Spelt({ text }: { text: string }) {
  return (
    <>
      {text.split("`").map((part, place) => {
        const key = `${place} ${part}`;
        return place % 2 === 1 ? <code key={key}>{part}</code> : <span key={key}>{part}</span>;
      })}
    </>
  );
}
