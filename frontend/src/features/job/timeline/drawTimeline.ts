/** Draws one step over all ranks. */
import type { ThemeName } from "../../../render/colour";
import type { Palette } from "../../../render/palette";
import type { Box, Surface } from "../../../render/surface";
import { tickStep, ticks } from "../../../render/ticks";
import type { Scale, Span } from "../../../render/viewport";
import { secondsTick } from "../../../store/format";
import { GROUPS, spanStyle } from "../../../trace/kinds";
import { spanAt, trackOf, type Lane, type SpanView, type TimelineModel } from "../../../trace/timeline";
import { frameOf, labelStride } from "../trackLayout";
import { AXIS_TOP, laneHeight, lanesIn, spanBox } from "./lanes";

const ARROW_LIMIT = 200;
/** Height of a lane whose label has its role in a line of its own. */
const TWO_LINES = 28;
/** Of the bar before a pass that ran before its turn. */
const EARLY_WIDTH = 3;

export interface TimelinePicture {
  readonly model: TimelineModel;
  readonly view: Span;
  readonly scale: Scale;
  readonly theme: ThemeName;
  readonly palette: Palette;
  readonly suspects: ReadonlySet<number>;
  readonly selectedRank: number | null;
  readonly selectedSpan: number | null;
  readonly hoveredSpan: number | null;
  /** Pixels of lanes that are scrolled past the top. */
  readonly scroll: number;
}

export function drawTimeline(surface: Surface, picture: TimelinePicture): void {
  const { model, palette } = picture;
  const frame = frameOf(surface.width);
  const shown = lanesIn(model.lanes.length, picture.scroll, surface.height);
  const eachLane = (draw: (lane: Lane, index: number) => void): void =>
    model.lanes.slice(shown.first, shown.end).forEach((lane, at) => draw(lane, shown.first + at));
  drawTimeAxis(surface, picture);
  // The label of the first of many low lanes is higher than its lane.
  const labels = { x: 0, y: AXIS_TOP - 4, width: surface.width, height: surface.height };
  surface.clipped(labels, () => eachLane((lane, index) => drawLaneBack(surface, picture, lane, index)));
  surface.clipped(
    { x: frame.left, y: AXIS_TOP, width: frame.right - frame.left, height: surface.height },
    () => {
      drawMissing(surface, picture, shown);
      eachLane((_, index) => drawSpans(surface, picture, index));
      drawFlows(surface, picture);
      for (const [index, colour] of [
        [picture.hoveredSpan, palette.muted],
        [picture.selectedSpan, palette.text],
      ] as const) {
        const span = index === null ? undefined : spanAt(model.source, index);
        if (span) surface.outline(grown(boxOf(picture, span)), colour, 2);
      }
    },
  );
}

const boxOf = (picture: TimelinePicture, span: SpanView): Box =>
  spanBox(
    span,
    picture.model.laneOf.get(span.rank) ?? 0,
    picture.model.lanes.length,
    picture.scale,
    picture.scroll,
  );

/** Hatches what is in view and not loaded yet. */
function drawMissing(
  surface: Surface,
  { model: { window, lanes }, view, scale, scroll, palette }: TimelinePicture,
  shown: { readonly first: number; readonly end: number },
): void {
  if (!window) return;
  const size = laneHeight(lanes.length);
  const hatch = (fromNs: number, toNs: number, first: number, end: number): void => {
    const x = scale.toPixel(fromNs);
    const box = { x, y: AXIS_TOP + first * size - scroll, width: scale.toPixel(toNs) - x };
    if (box.width > 1 && end > first)
      surface.hatch({ ...box, height: (end - first) * size }, palette.missing);
  };
  const [first, end] = [
    Math.max(shown.first, window.firstTrack),
    Math.min(shown.end, window.firstTrack + window.tracks),
  ];
  hatch(view.from, view.to, shown.first, Math.min(first, shown.end));
  hatch(view.from, view.to, Math.max(end, shown.first), shown.end);
  hatch(view.from, Math.min(window.fromNs, view.to), first, end);
  hatch(Math.max(window.toNs, view.from), view.to, first, end);
}

const grown = ({ x, y, width, height }: Box): Box => ({
  x: x - 1.5,
  y: y - 1.5,
  width: width + 3,
  height: height + 3,
});

function drawTimeAxis(surface: Surface, { view, scale, palette, model }: TimelinePicture): void {
  const frame = frameOf(surface.width);
  const count = Math.max(2, Math.floor((frame.right - frame.left) / 100));
  const [from, to] = [view.from - model.fromNs, view.to - model.fromNs];
  const step = tickStep(to - from, count) / 1e9;
  for (const tick of ticks(from, to, count)) {
    const x = surface.snap(scale.toPixel(tick + model.fromNs));
    surface.rect({ x, y: AXIS_TOP - 6, width: 1, height: surface.height }, palette.grid);
    if (x < frame.right - 44)
      surface.text(secondsTick(tick / 1e9, step), x + 4, 10, { colour: palette.muted });
  }
}

function drawLaneBack(surface: Surface, picture: TimelinePicture, { rank, role }: Lane, lane: number): void {
  const { palette, suspects, selectedRank, model } = picture;
  const size = laneHeight(model.lanes.length);
  const y = AXIS_TOP + lane * size - picture.scroll;
  const [suspect, selected] = [suspects.has(rank), rank === selectedRank];
  surface.rect({ x: 0, y: y + size - 0.5, width: surface.width, height: 1 }, palette.grid);
  const above = model.lanes[lane - 1];
  if (above && above.role !== role)
    surface.rect({ x: 0, y: y - 1, width: surface.width, height: 2 }, palette.border);
  if (selected) surface.rect({ x: 0, y, width: 3, height: size }, palette.accent);
  if (lane % labelStride(size) === 0 || suspect)
    drawLaneLabel(surface, picture, { rank, role }, y + size / 2);
}

/** The rank, and its role: a line of its own in a high lane, F or B in a low one. */
function drawLaneLabel(
  surface: Surface,
  { palette, suspects, selectedRank, model }: TimelinePicture,
  { rank, role }: Pick<Lane, "rank" | "role">,
  middle: number,
): void {
  const [suspect, selected] = [suspects.has(rank), rank === selectedRank];
  const twoLines = role !== null && laneHeight(model.lanes.length) >= TWO_LINES;
  const initial = role === null || twoLines ? "" : `${role.charAt(0).toUpperCase()} `;
  const text = `${suspect ? "▲ " : ""}${initial}rank ${rank}`;
  const colour = suspect ? palette.alarm : selected ? palette.text : palette.muted;
  const weight = suspect || selected ? 650 : 400;
  const x = frameOf(surface.width).left - 8;
  surface.text(text, x, twoLines ? middle - 6 : middle, { colour, weight, align: "right" });
  if (twoLines) surface.text(role, x, middle + 7, { colour, weight: 400, align: "right", size: 10 });
}

/** Spans that would fall on a pixel that one of the same kind has already taken are left out. */
function drawSpans(surface: Surface, picture: TimelinePicture, lane: number): void {
  const { model, view } = picture;
  const taken = new Map<number, number>();
  for (const index of model.lanes[lane]?.all ?? []) {
    const span = spanAt(model.source, index);
    if (!span || span.endNs < view.from || span.startNs > view.to) continue;
    const box = spanBox(span, lane, model.lanes.length, picture.scale, picture.scroll);
    if (box.width <= 1) {
      const pixel = Math.floor(box.x);
      if (taken.get(span.kind) === pixel) continue;
      taken.set(span.kind, pixel);
    }
    drawSpan(surface, picture, span, box);
  }
}

function drawSpan(surface: Surface, { theme, palette }: TimelinePicture, span: SpanView, box: Box): void {
  const { group, short } = spanStyle(span);
  const style = GROUPS[group];
  if (trackOf(span.kind) === "frame") {
    surface.rect(box, palette.border);
    return;
  }
  const body = box.width > 3 ? { ...box, width: box.width - 1 } : box;
  surface.rect(body, style.colour[theme]);
  if (style.hatched && box.width > 4) surface.hatch(body, group === "fault" ? palette.panel : palette.border);
  if (span.runQueueNs && box.width > 8) drawRunQueue(surface, span, body, style.ink[theme]);
  drawMarks(surface, span, body, palette);
  if (box.width >= 22 && box.height >= 13) drawLabel(surface, span, box, short, style.ink[theme]);
}

/** A bar before a pass that ran before its turn, and a line along a span with an injected fault. */
function drawMarks(surface: Surface, span: SpanView, body: Box, palette: Palette): void {
  if (span.early && body.width >= EARLY_WIDTH) surface.rect({ ...body, width: EARLY_WIDTH }, palette.text);
  if (span.injected) surface.rect({ ...body, height: 3 }, palette.alarm);
}

function drawLabel(surface: Surface, span: SpanView, box: Box, short: string, ink: string): void {
  const [left, right] = [
    Math.max(box.x, frameOf(surface.width).left),
    Math.min(box.x + box.width, surface.width),
  ];
  const label =
    span.microbatch === null ? short : `${short}${short.length === 1 ? "" : " "}${span.microbatch}`;
  surface.text(label, left + 6, box.y + box.height / 2, {
    colour: ink,
    weight: 550,
    maxWidth: right - left - 10,
  });
}

/** How much of the span the thread waited for a processor: a line near its foot, as long as that share. */
function drawRunQueue(surface: Surface, span: SpanView, box: Box, colour: string): void {
  const share = Math.min(1, (span.runQueueNs ?? 0) / Math.max(span.durationNs, 1));
  if (share < 0.02 || box.height < 10) return;
  surface.rect(
    { x: box.x + 2, y: box.y + box.height - 5, width: (box.width - 4) * share, height: 2 },
    colour,
  );
}

/** Arrows of the selected transfer, or of all transfers of the selected rank. */
function drawFlows(surface: Surface, picture: TimelinePicture): void {
  const { model, selectedSpan, selectedRank, palette } = picture;
  const ofSelected = selectedSpan === null ? undefined : model.flowsOf.get(selectedSpan);
  const ofRank = ([send, receive]: readonly [number, number]): boolean =>
    model.source.rank[send] === selectedRank || model.source.rank[receive] === selectedRank;
  const flows =
    ofSelected ?? (selectedRank === null || selectedSpan !== null ? [] : model.source.flows.filter(ofRank));
  for (const [send, receive] of flows.slice(0, ARROW_LIMIT)) {
    const [from, to] = [spanAt(model.source, send), spanAt(model.source, receive)];
    if (!from || !to) continue;
    const [start, end] = [boxOf(picture, from), boxOf(picture, to)];
    surface.arrow(
      [start.x + start.width, start.y + start.height / 2],
      [end.x + end.width, end.y + end.height / 2],
      ofSelected ? palette.text : palette.muted,
      ofSelected ? 2 : 1,
    );
  }
}
