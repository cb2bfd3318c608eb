/** A window [from, to] on one axis (steps or nanoseconds), and the arithmetic of pan and zoom. All functions are pure. */

export interface Span {
  readonly from: number;
  readonly to: number;
}

export interface Limits extends Span {
  /** Shortest window that zooming reaches, in units of the axis. */
  readonly minimum: number;
}

export const length = (span: Span): number => span.to - span.from;

/** `span` moved and shortened so that it lies within `limits`. */
export function clamp(span: Span, limits: Limits): Span {
  const whole = Math.max(length(limits), limits.minimum);
  const size = Math.min(Math.max(length(span), limits.minimum), whole);
  const centre = (span.from + span.to) / 2;
  const from = Math.min(Math.max(centre - size / 2, limits.from), limits.from + whole - size);
  return { from, to: from + size };
}

/** Zoom by `factor` (below 1: closer) with the point at `anchor` (in axis units) staying where it is. */
export function zoom(span: Span, factor: number, anchor: number, limits: Limits): Span {
  const size = Math.min(
    Math.max(length(span) * factor, limits.minimum),
    Math.max(length(limits), limits.minimum),
  );
  const share = length(span) > 0 ? (anchor - span.from) / length(span) : 0.5;
  const from = anchor - share * size;
  return clamp({ from, to: from + size }, limits);
}

/** Move by a share of the window: 0.1 is a tenth to the right. */
export function pan(span: Span, share: number, limits: Limits): Span {
  const by = share * length(span);
  return clamp({ from: span.from + by, to: span.to + by }, limits);
}

/** `span`, moved just so far that `at` .. `at + width` is inside with a margin; unchanged where it already is. */
export function reveal(span: Span, at: number, width: number, limits: Limits): Span {
  if (at >= span.from && at + width <= span.to) return span;
  const size = Math.max(length(span), width * 1.2);
  const from = at + width / 2 - size / 2;
  return clamp({ from, to: from + size }, limits);
}

/** Maps axis units to pixels and back. */
export interface Scale {
  readonly toPixel: (value: number) => number;
  readonly toValue: (pixel: number) => number;
}

export function linear(span: Span, left: number, right: number): Scale {
  const size = length(span) || 1;
  const width = right - left || 1;
  return {
    toPixel: (value) => left + ((value - span.from) / size) * width,
    toValue: (pixel) => span.from + ((pixel - left) / width) * size,
  };
}
