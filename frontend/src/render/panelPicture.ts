/** A panel as a picture: its elements, drawn again from their boxes. Buttons and fields are left out. */
import { hatchPattern } from "./surface";

const LEFT_OUT = "[data-unsaved], input, select, textarea, .button, .visually-hidden";
const COLOUR = /rgba?\([^)]*\)/g;

interface Painter {
  readonly context: CanvasRenderingContext2D;
  readonly left: number;
  readonly top: number;
}

const seen = (colour: string): boolean => colour !== "transparent" && !/,\s*0\)$|\/\s*0\)$/.test(colour);

function boxOf({ left, top }: Painter, element: Element): DOMRect {
  const box = element.getBoundingClientRect();
  return new DOMRect(box.x - left, box.y - top, box.width, box.height);
}

function outline({ context }: Painter, box: DOMRect, style: CSSStyleDeclaration): void {
  const sides = [
    [style.borderTopWidth, style.borderTopColor, box.x, box.y, box.width, 0],
    [style.borderBottomWidth, style.borderBottomColor, box.x, box.bottom, box.width, 0],
    [style.borderLeftWidth, style.borderLeftColor, box.x, box.y, 0, box.height],
    [style.borderRightWidth, style.borderRightColor, box.right, box.y, 0, box.height],
  ] as const;
  for (const [width, colour, x, y, across, down] of sides) {
    const size = Number.parseFloat(width) || 0;
    if (size === 0 || !seen(colour)) continue;
    context.fillStyle = colour;
    const inset = (end: number, edge: number): number => (end === edge ? edge - size : end);
    context.fillRect(
      across > 0 ? x : inset(x, box.right),
      down > 0 ? y : inset(y, box.bottom),
      across || size,
      down || size,
    );
  }
}

/** Colour bars are gradients to the right; stripes mark missing values. */
function background(
  context: CanvasRenderingContext2D,
  box: DOMRect,
  image: string,
): string | CanvasPattern | CanvasGradient | null {
  const colours = image.match(COLOUR) ?? [];
  if (image.startsWith("repeating-")) {
    const stripe = colours.find(seen);
    return stripe ? hatchPattern(context, stripe) : null;
  }
  if (!image.startsWith("linear-gradient(to right") || colours.length < 2) return null;
  const gradient = context.createLinearGradient(box.x, 0, box.right, 0);
  colours.forEach((colour, index) => gradient.addColorStop(index / (colours.length - 1), colour));
  return gradient;
}

function paintBox(painter: Painter, box: DOMRect, style: CSSStyleDeclaration): void {
  const { context } = painter;
  const radius = Number.parseFloat(style.borderTopLeftRadius) || 0;
  const fill = (with_: string | CanvasPattern | CanvasGradient): void => {
    context.beginPath();
    context.roundRect(box.x, box.y, box.width, box.height, radius);
    context.fillStyle = with_;
    context.fill();
  };
  if (seen(style.backgroundColor)) fill(style.backgroundColor);
  const image = style.backgroundImage === "none" ? null : background(context, box, style.backgroundImage);
  if (image) fill(image);
  outline(painter, box, style);
}

/** Word by word, so that lines break where the page breaks them. */
function paintText({ context, left, top }: Painter, node: Text, style: CSSStyleDeclaration): void {
  const range = document.createRange();
  context.font = `${style.fontStyle} ${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  context.fillStyle = style.color;
  context.textBaseline = "middle";
  for (const word of node.data.matchAll(/\S+/g)) {
    range.setStart(node, word.index);
    range.setEnd(node, word.index + word[0].length);
    const box = range.getBoundingClientRect();
    if (box.width > 0) context.fillText(word[0], box.x - left, box.y - top + box.height / 2);
  }
}

function paintMarker(painter: Painter, svg: SVGSVGElement): void {
  const { context } = painter;
  const box = boxOf(painter, svg);
  const view = svg.viewBox.baseVal;
  context.save();
  context.translate(box.x, box.y);
  context.scale(box.width / view.width, box.height / view.height);
  context.translate(-view.x, -view.y);
  for (const path of svg.querySelectorAll("path")) {
    context.fillStyle = getComputedStyle(path).fill;
    context.fill(new Path2D(path.getAttribute("d") ?? ""));
  }
  context.restore();
}

function paint(painter: Painter, element: Element): void {
  const { context } = painter;
  const style = getComputedStyle(element);
  if (element.matches(LEFT_OUT) || style.display === "none" || style.visibility === "hidden") return;
  const box = boxOf(painter, element);
  if (element instanceof SVGSVGElement) return paintMarker(painter, element);
  paintBox(painter, box, style);
  if (element instanceof HTMLCanvasElement) {
    if (element.width > 0) context.drawImage(element, box.x, box.y, box.width, box.height);
    return;
  }
  context.save();
  if (style.overflowX !== "visible" || style.overflowY !== "visible") {
    context.beginPath();
    context.rect(box.x, box.y, box.width, box.height);
    context.clip();
  }
  for (const child of element.childNodes) {
    if (child instanceof Text) paintText(painter, child, style);
    else if (child instanceof Element) paint(painter, child);
  }
  context.restore();
}

/** The picture, at the device's resolution. */
export function panelPicture(panel: Element): HTMLCanvasElement {
  const { x, y, width, height } = panel.getBoundingClientRect();
  const ratio = window.devicePixelRatio || 1;
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.ceil(width * ratio), Math.ceil(height * ratio)];
  const context = canvas.getContext("2d");
  if (!context) throw new Error("this browser gives no 2d canvas");
  context.scale(ratio, ratio);
  context.fillStyle = getComputedStyle(document.body).backgroundColor;
  context.fillRect(0, 0, width, height);
  paint({ context, left: x, top: y }, panel);
  return canvas;
}
