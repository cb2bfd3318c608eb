"""A small WordPiece vocabulary, and documents of sentences that it can spell."""

import json
import pathlib
import random

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WHOLE = ("the", "rank", "waits", "for", "a", "slow", "link", "and", "The", "Rank")
ENDINGS = ("##s", "##er", "##ing", "##ed")
LETTERS = tuple("abcdefghijklmnopqrstuvwxyzAR.!?,0123456789")


def write_vocabulary(path: pathlib.Path) -> list[str]:
    """Write a vocab.txt, and return its tokens."""
    tokens = [*SPECIAL, *dict.fromkeys((*WHOLE, *LETTERS, *(f"##{letter}" for letter in LETTERS), *ENDINGS))]
    path.write_text("\n".join(tokens) + "\n", encoding="utf-8")
    return tokens


def document(number: int, *, sentences: int | None = None) -> str:
    """Return a text of some sentences, a function of its number."""
    source = random.Random(number)
    count = sentences or source.randint(2, 6)
    return " ".join(_sentence(source) for _ in range(count))


def _sentence(source: random.Random) -> str:
    middle = [source.choice(WHOLE[:8]) + source.choice(("", "s", "er", "ing")) for _ in range(source.randint(2, 7))]
    return " ".join(["The", *middle, "rank"]) + source.choice((".", "!", "?"))


def write_documents(path: pathlib.Path, count: int) -> list[str]:
    """Write a JSONL file, and return its texts."""
    texts = [document(number) for number in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return texts
