// Ranges and ticks of a chart's axes. No drawing.

/** Least length of a time axis: a single report is no line from one end to the other. */
export const LEAST_TIME_S = 60;

export function aroundPoint(low: number, high: number): [number, number] {
  const centre = (low + high) / 2;
  return [centre - LEAST_TIME_S / 2, centre + LEAST_TIME_S / 2];
}

/** The values with some space around; a range of its own where there are none, or none above nought. */
export function logarithmicRange(low: number | null, high: number | null): [number, number] {
  return low === null || high === null || low <= 0 || !Number.isFinite(high) ? [1, 10] : [low / 1.15, high * 1.15];
}

/** One, two and five of each power of ten; none for a range that has no logarithm. */
export function steps(low: number, high: number): number[] {
  if (!(low > 0) || !Number.isFinite(high)) return [];
  const ticks: number[] = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const base of [1, 2, 5]) ticks.push(base * 10 ** power);
  }
  return ticks.filter((tick) => tick >= low && tick <= high);
}
