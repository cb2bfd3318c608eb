/** Texts of tokens as people read them: spaces and line ends made visible, characters that several tokens share are shown once. */
import type { SampleStore } from "../store/sampleStore";

export interface Piece {
  readonly position: number;
  readonly id: number;
  /** What the strip and axes show: its spaces are visible, many of them are counted. */
  readonly label: string;
  /** In quotes, for a sentence that is read. */
  readonly name: string;
  /** For a screen reader: spaces, tabs and line ends in words. */
  readonly spoken: string;
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

/** Label of a candidate; `text` is of the token alone, undefined if it is unknown. */
export function candidateName(id: number, text: string | undefined): string {
  if (text === undefined || text === "") return `token ${id}`;
  return text.includes("\ufffd") ? `part of a character (token ${id})` : visibleText(text);
}

/** Runs of spaces that are longer are counted: `␣₈`. */
const SHOWN_SPACES = 3;
const subscript = (count: number): string =>
  [...String(count)].map((digit) => String.fromCharCode(0x2080 + Number(digit))).join("");

/** Visible, and short enough for an axis. */
export const labelText = (text: string): string =>
  visibleText(text).replace(/␣+/g, (run) =>
    run.length > SHOWN_SPACES && text.includes(" ".repeat(run.length)) ? `␣${subscript(run.length)}` : run,
  );

const WHITE: Readonly<Record<string, string>> = {
  " ": "space",
  "\n": "line end",
  "\r": "return",
  "\t": "tab",
};

/** White space in words: "line end, 7 spaces". */
const spokenWhite = (white: string): string =>
  [...white.matchAll(/(.)\1*/gs)]
    .map(([run, sign = ""]) => {
      const word = WHITE[sign] ?? "white space";
      return run.length === 1 ? word : `${run.length} ${word}s`;
    })
    .join(", ");

/** A text as it is read aloud, with quotes around what is between white space. */
export function spokenText(text: string): string {
  const [, before = "", core = "", after = ""] = /^(\s*)(.*?)(\s*)$/s.exec(text) ?? [];
  const words = [spokenWhite(before), core && `“${visibleText(core)}”`, spokenWhite(after)];
  return words.filter((word) => word !== "").join(" ");
}

export function pieceAt(sample: SampleStore, position: number): Piece {
  const text = sample.texts[position] ?? "";
  const id = sample.ids[position] ?? -1;
  const partial = text === "";
  const part = `part of a character (token ${id})`;
  return {
    position,
    id,
    label: partial ? "…" : labelText(text),
    name: partial ? part : `“${visibleText(text)}”`,
    spoken: partial ? part : spokenText(text),
    generated: position >= sample.promptLength,
    partial,
  };
}

/** All pieces from `first` to before `end`. */
export function pieces(sample: SampleStore, first = 0, end = sample.length): Piece[] {
  return Array.from({ length: Math.max(0, end - first) }, (_, index) => pieceAt(sample, first + index));
}
