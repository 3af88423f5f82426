// A chart in the page's colours, as wide as there is room. What it shows stands in words beside it: a picture alone is
// nothing to who cannot see it.

import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

export type Colour = "device" | "link" | "remote" | "ink" | "faint" | "warn" | "cut1" | "cut2" | "cut3" | "cut4";

export interface Line {
  label: string;
  colour: Colour;
  values: (number | null)[];
  /** What the legend says of a point, where that is not the drawn value. */
  told?: (index: number) => string;
  width?: number;
  filled?: boolean;
  dashed?: boolean;
  scale?: string;
  unlisted?: boolean;
}

export interface Axis {
  format: (value: number) => string;
  logarithmic?: boolean;
  least?: number;
}

export interface ChartProps {
  label: string;
  x: number[];
  lines: Line[];
  xAxis: Axis & { time?: boolean };
  yAxis: Axis;
  /** A second axis at the right, for lines of scale `right`. */
  rightAxis?: Axis;
  height?: number;
  point?: { x: number; y: number; label: string } | undefined;
}

export function Chart(props: ChartProps) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const drawn = useRef(props);
  drawn.current = props;
  const theme = useThemeChanges();
  const shape = JSON.stringify([
    props.lines.map((line) => [line.label, line.colour, line.width, line.filled, line.scale]),
    props.xAxis.logarithmic,
    props.yAxis.logarithmic,
    props.rightAxis !== undefined,
    theme,
  ]);

  // a chart is made anew where its shape changes
  useEffect(() => {
    const element = place.current;
    if (element === null) return;
    const made = new uPlot(options(drawn, element.clientWidth), data(drawn.current), element);
    plot.current = made;
    const watcher = new ResizeObserver(() => {
      if (element.clientWidth > 0) made.setSize({ width: element.clientWidth, height: drawn.current.height ?? 180 });
    });
    watcher.observe(element);
    return () => {
      watcher.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape]);

  useEffect(() => plot.current?.setData(data(props)), [props]);

  return <div ref={place} class="chart" role="img" aria-label={props.label} />;
}

function data(props: ChartProps): uPlot.AlignedData {
  return [props.x, ...props.lines.map((line) => line.values)];
}

function options(props: { current: ChartProps }, width: number): uPlot.Options {
  const { lines, xAxis, yAxis, rightAxis, height } = props.current;
  const ink = colour("faint");
  const grid = { stroke: css("--grid"), width: 1 };
  const font = `11px ${css("--font")}`;
  const axis = (one: Axis): uPlot.Axis => ({
    stroke: ink,
    grid,
    ticks: { show: false },
    font,
    size: 52,
    values: (_, values) => values.map((value) => (value === null ? "" : one.format(value))),
  });
  const scale = (one: Axis): uPlot.Scale =>
    one.logarithmic
      ? { distr: 3, range: (_, low, high) => [low / 1.15, high * 1.15] }
      : { range: (_, low, high) => ranged(one.least, low, high) };
  return {
    width,
    height: height ?? 180,
    padding: [10, rightAxis === undefined ? 12 : 0, 0, 0],
    legend: { live: true },
    cursor: { points: { size: 6 }, drag: { x: false, y: false } },
    scales: {
      x: xAxis.time ? { time: true } : xAxis.logarithmic ? { time: false, distr: 3 } : { time: false },
      y: scale(yAxis),
      ...(rightAxis === undefined ? {} : { right: scale(rightAxis) }),
    },
    axes: [
      {
        stroke: ink,
        grid: { show: false },
        ticks: { show: true, stroke: css("--grid"), size: 4 },
        font,
        ...(xAxis.time ? {} : { values: (_, values) => values.map((one) => (one === null ? "" : xAxis.format(one))) }),
      },
      { ...axis(yAxis), scale: "y" },
      ...(rightAxis === undefined
        ? []
        : [{ ...axis(rightAxis), side: 1 as const, scale: "right", grid: { show: false } }]),
    ],
    series: [
      { label: xAxis.time ? "at" : "", value: (_, value) => (value === null ? "" : at(value, xAxis)) },
      ...lines.map((line, place) => series(props, line, place)),
    ],
    hooks: { draw: [(plot) => mark(plot, props.current.point)] },
  };
}

function series(props: { current: ChartProps }, line: Line, place: number): uPlot.Series {
  const axis = line.scale === "right" && props.current.rightAxis ? props.current.rightAxis : props.current.yAxis;
  return {
    label: line.label,
    scale: line.scale ?? "y",
    stroke: colour(line.colour),
    width: line.width ?? 1.5,
    points: { show: line.values.length < 2, size: 4 },
    ...(line.dashed ? { dash: [5, 4] } : {}),
    ...(line.filled ? { fill: `${colour(line.colour)}${css("--fill")}` } : {}),
    ...(line.unlisted ? { class: "unlisted" } : {}),
    value: (_, value, __, index) => {
      if (value === null || value === undefined || index === null) return "";
      const told = props.current.lines[place]?.told;
      return told ? told(index) : axis.format(value);
    },
  };
}

function at(value: number, axis: ChartProps["xAxis"]): string {
  return axis.time ? new Date(value * 1000).toLocaleTimeString("en-GB") : axis.format(value);
}

/** From nought unless that would flatten everything; with a little air above. */
function ranged(least: number | undefined, low: number | null, high: number | null): [number, number] {
  const top = high === null || high <= 0 ? 1 : high * 1.08;
  return [least ?? Math.min(0, low ?? 0), top];
}

function mark(plot: uPlot, point: ChartProps["point"]): void {
  if (point === undefined) return;
  const [x, y] = [plot.valToPos(point.x, "x", true), plot.valToPos(point.y, "y", true)];
  const { left, top, width, height } = plot.bbox;
  if (x < left || x > left + width) return;
  const held = Math.max(top, Math.min(top + height, y));
  const [pen, scale] = [plot.ctx, devicePixelRatio];
  pen.save();
  pen.strokeStyle = colour("ink");
  pen.fillStyle = css("--panel");
  pen.lineWidth = scale;
  pen.setLineDash([3 * scale, 3 * scale]);
  pen.beginPath();
  pen.moveTo(x, top);
  pen.lineTo(x, top + height);
  pen.stroke();
  pen.setLineDash([]);
  pen.lineWidth = 2 * scale;
  pen.beginPath();
  pen.arc(x, held, 5 * scale, 0, 2 * Math.PI);
  pen.fill();
  pen.stroke();
  pen.fillStyle = colour("ink");
  pen.font = `600 ${11 * scale}px ${css("--font")}`;
  const right = x < left + width * 0.7;
  pen.textAlign = right ? "left" : "right";
  pen.fillText(point.label, x + (right ? 9 : -9) * scale, Math.max(held - 8 * scale, top + 11 * scale));
  pen.restore();
}

function css(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function colour(name: Colour): string {
  return css(`--${name}`);
}

/** A number that grows when the colours change. */
function useThemeChanges(): number {
  const [count, setCount] = useState(0);
  useEffect(() => {
    const changed = () => setCount((before) => before + 1);
    const query = matchMedia("(prefers-color-scheme: dark)");
    query.addEventListener("change", changed);
    addEventListener("themechange", changed);
    return () => {
      query.removeEventListener("change", changed);
      removeEventListener("themechange", changed);
    };
  }, []);
  return count;
}
