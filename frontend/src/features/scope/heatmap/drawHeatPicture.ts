/** Draws a heat map: hatch, cells, marks, labels. */
import { Mask } from "../../../render/cells";
import type { HeatImage } from "../../../render/heatImage";
import type { Palette } from "../../../render/palette";
import type { Box, Surface } from "../../../render/surface";
import { drawCellTexts } from "./drawCellTexts";
import { drawColumnLabels, drawRowLabels } from "./drawLabels";
import { frameOf, scalesOf, type HeatPicture, type Mark, type Scales } from "./heatPicture";

export function drawHeatPicture(
  surface: Surface,
  image: HeatImage,
  picture: HeatPicture,
  palette: Palette,
): void {
  const frame = frameOf(picture, surface.width, surface.height);
  const scales = scalesOf(picture, frame);
  image.sync(picture.cells, picture.map.table);
  surface.clipped(frame, () => {
    surface.hatch(frame, palette.missing);
    drawImage(surface, image, picture, frame);
    drawNans(surface, picture, scales, palette);
    if (picture.gaps) drawGaps(surface, picture, frame, scales, palette);
    drawCellTexts(surface, picture, scales);
    for (const mark of picture.marks) drawMark(surface, mark, frame, scales, palette);
  });
  surface.outline(frame, palette.grid);
  drawRowLabels(surface, picture, frame, scales, palette);
  drawColumnLabels(surface, picture, scales, palette);
}

function drawImage(
  surface: Surface,
  image: HeatImage,
  { rows, columns, group, origin }: HeatPicture,
  frame: Box,
): void {
  const view = {
    x: (origin?.column ?? 0) + columns.from * group,
    y: (origin?.row ?? 0) + rows.from * group,
    width: (columns.to - columns.from) * group,
    height: (rows.to - rows.from) * group,
  };
  image.paint(surface.context, view, frame);
}

/** Cells that are not a number have stripes of their own. */
function drawNans(surface: Surface, { cells, group }: HeatPicture, { x, y }: Scales, palette: Palette): void {
  for (let at = cells.mask.indexOf(Mask.NAN); at >= 0; at = cells.mask.indexOf(Mask.NAN, at + 1)) {
    const [row, column] = [Math.floor(at / cells.columns) / group, (at % cells.columns) / group];
    const [left, top] = [x.toPixel(column), y.toPixel(row)];
    const box = {
      x: left,
      y: top,
      width: x.toPixel(column + 1 / group) - left,
      height: y.toPixel(row + 1 / group) - top,
    };
    surface.hatch(box, palette.alarm);
  }
}

const GAP_FROM_PX = 9;

function drawGaps(
  surface: Surface,
  picture: HeatPicture,
  frame: Box,
  { x, y }: Scales,
  palette: Palette,
): void {
  const { rows, columns } = picture;
  if (x.toPixel(1) - x.toPixel(0) >= GAP_FROM_PX) {
    for (let column = Math.ceil(columns.from); column <= columns.to; column += 1)
      surface.rect({ x: x.toPixel(column) - 0.5, y: frame.y, width: 1, height: frame.height }, palette.panel);
  }
  if (y.toPixel(1) - y.toPixel(0) < GAP_FROM_PX) return;
  for (let row = Math.ceil(rows.from); row <= rows.to; row += 1)
    surface.rect({ x: frame.x, y: y.toPixel(row) - 0.5, width: frame.width, height: 1 }, palette.panel);
}

function drawMark(surface: Surface, mark: Mark, frame: Box, { x, y }: Scales, palette: Palette): void {
  const [left, top] = [x.toPixel(mark.column), y.toPixel(mark.row)];
  const cell = {
    x: left,
    y: top,
    width: x.toPixel(mark.column + (mark.columns ?? 1)) - left,
    height: y.toPixel(mark.row + (mark.rows ?? 1)) - top,
  };
  const box =
    mark.kind === "row"
      ? { ...cell, x: frame.x, width: frame.width }
      : mark.kind === "column"
        ? { ...cell, y: frame.y, height: frame.height }
        : cell;
  if (mark.kind === "pinned") return drawPin(surface, cell, palette);
  const grown = { x: box.x - 1, y: box.y - 1, width: box.width + 2, height: box.height + 2 };
  if (mark.kind === "selected" || mark.kind === "cursor") {
    surface.outline(
      { x: grown.x - 1, y: grown.y - 1, width: grown.width + 2, height: grown.height + 2 },
      palette.panel,
      1,
    );
    surface.outline(grown, mark.kind === "selected" ? palette.accent : palette.text, 2);
    return;
  }
  if (mark.kind === "area") surface.outline(grown, palette.panel, 4);
  surface.outline(grown, mark.kind === "area" ? palette.text : palette.accent, mark.kind === "area" ? 2 : 1);
}

/** A corner in the upper right. */
function drawPin(surface: Surface, { x, y, width, height }: Box, palette: Palette): void {
  const size = Math.max(5, Math.min(9, width / 2, height / 2));
  const { context } = surface;
  context.beginPath();
  context.moveTo(x + width - size - 2, y);
  context.lineTo(x + width, y);
  context.lineTo(x + width, y + size + 2);
  context.closePath();
  context.fillStyle = palette.accent;
  context.fill();
  context.strokeStyle = palette.panel;
  context.lineWidth = 1;
  context.stroke();
}
