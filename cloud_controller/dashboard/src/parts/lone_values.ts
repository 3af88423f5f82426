// Values of a line that no segment reaches. No drawing.

/** The indices of values without a neighbour: a line through one minute's value alone is nothing to be seen. */
export function loneValues(values: ArrayLike<number | null | undefined>): number[] {
  const isMissing = (index: number) => values[index] === null || values[index] === undefined;
  return Array.from({ length: values.length }, (_, index) => index).filter(
    (index) => !isMissing(index) && isMissing(index - 1) && isMissing(index + 1),
  );
}
