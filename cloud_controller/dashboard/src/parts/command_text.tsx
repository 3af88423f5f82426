// Text of the controller with its commands, which are between backticks, set as code.

export function CommandText({ text }: { text: string }) {
  return (
    <>
      {text.split("`").map((part, place) => {
        const key = `${place} ${part}`;
        return place % 2 === 1 ? <code key={key}>{part}</code> : <span key={key}>{part}</span>;
      })}
    </>
  );
}
