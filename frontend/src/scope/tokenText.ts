/** Texts of tokens as people read them: spaces and line ends made visible, characters that several tokens share told once. */
import type { SampleStore } from "./sampleStore";

export interface Piece {
  readonly position: number;
  readonly id: number;
  /** What the strip shows. */
  readonly label: string;
  /** How a sentence calls it, in quotes. */
  readonly name: string;
  readonly generated: boolean;
  /** The token ends no character: its bytes belong to the piece that follows. */
  readonly partial: boolean;
}

const VISIBLE: Readonly<Record<string, string>> = { "\n": "↵", "\r": "␍", "\t": "⇥", " ": "␣" };
const CONTROL = /[\u0000-\u001f\u007f]/g;

/** Spaces at the ends, line ends, tabs and control characters get a sign of their own. */
export function visibleText(text: string): string {
  const shown = text.replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));
  return shown.replace(
    CONTROL,
    (sign) => VISIBLE[sign] ?? String.fromCharCode(0x2400 + (sign.charCodeAt(0) % 0x21)),
  );
}

/** What a candidate is called; `text` is of the token alone, undefined where nobody told. */
export function candidateName(id: number, text: string | undefined): string {
  if (text === undefined || text === "") return `token ${id}`;
  return text.includes("\ufffd") ? `part of a character (token ${id})` : visibleText(text);
}

export function pieceAt(sample: SampleStore, position: number): Piece {
  const text = sample.texts[position] ?? "";
  const id = sample.ids[position] ?? -1;
  const partial = text === "";
  const label = partial ? "…" : visibleText(text.startsWith(" ") ? text.slice(1) || text : text);
  return {
    position,
    id,
    label,
    name: partial
      ? `part of a character (token ${id})`
      : `“${visibleText(text.trim() === "" ? text : text.trim())}”`,
    generated: position >= sample.promptLength,
    partial,
  };
}

/** All pieces from `first` to before `end`. */
export function pieces(sample: SampleStore, first = 0, end = sample.length): Piece[] {
  return Array.from({ length: Math.max(0, end - first) }, (_, index) => pieceAt(sample, first + index));
}
