/** Draws ranks as small squares by their slowdown. */
import type { RankView } from "../../api/types";
import type { ColourMap } from "../../render/colour";
import type { Palette } from "../../render/palette";
import type { Surface } from "../../render/surface";
import { TITLE, type RankGrid } from "./rankGrid";

export interface RankPicture {
  readonly grid: RankGrid;
  readonly map: ColourMap;
  readonly palette: Palette;
  readonly slowdown: (rank: RankView) => number | undefined;
  readonly isMarked: (rank: RankView) => boolean;
  readonly selected: number | null;
}

/** A frame so small a square has none of: it is drawn around it. */
const LEAST_FRAME = 6;

export function drawRankGrid(surface: Surface, { grid, map, palette, ...picture }: RankPicture): void {
  const { columns, size } = grid;
  for (const { title, ranks, y } of grid.blocks) {
    surface.text(title, 0, y - TITLE / 2, { colour: palette.muted });
    const rows = Math.ceil(ranks.length / columns);
    const values = new Float32Array(rows * columns).fill(Number.NaN);
    ranks.forEach((rank, at) => (values[at] = picture.slowdown(rank) ?? Number.NaN));
    const full = Math.floor(ranks.length / columns);
    surface.rect({ x: 0, y, width: columns * size, height: full * size }, palette.missing);
    const rest = (ranks.length - full * columns) * size;
    surface.rect({ x: 0, y: y + full * size, width: rest, height: size }, palette.missing);
    surface.image(values, columns, rows, map, { x: 0, y, width: columns * size, height: rows * size });
    ranks.forEach((rank, at) => {
      const isSelected = rank.rank === picture.selected;
      if (!isSelected && !picture.isMarked(rank)) return;
      const grown = size < LEAST_FRAME ? 2 : 0;
      const box = {
        x: (at % columns) * size - grown,
        y: y + Math.floor(at / columns) * size - grown,
        width: size + 2 * grown,
        height: size + 2 * grown,
      };
      surface.outline(box, isSelected ? palette.text : palette.alarm, 2);
    });
  }
}
