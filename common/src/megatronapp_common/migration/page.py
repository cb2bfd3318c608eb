"""Generation of the page docs/from-megatronapp.md."""

from collections.abc import Iterator, Mapping

from megatronapp_common.migration.answer import find_translations
from megatronapp_common.migration.commands import COMMANDS, LegacyCommand
from megatronapp_common.migration.names import CONTROLS, FIELDS, FILES, FLAGS, VARIABLES

_HEAD = """\
# From MegatronApp's commands to ours

Every command, script, flag, variable, file and control that the pages of MegatronApp name, with what to run now. Made
from `megatronapp_common.migration` by `make generate`; a test types each of them. The same answers in a shell:

```sh
megatronapp translate "bash scripts/run_single_gpt.sh"
megatronapp translate 'python tools/checkpoint/convert.py --loader legacy --load-dir gpt2-legacy --save-dir gpt2'
megatronapp translate -- --trace-interval 5
megatronapp translate "$(cat pretrain_gpt.sh)"   # a script of your own: its commands, flags and variables
```

"Not yet" marks what a later release brings: T5. Flags of a training command that the trainer does not take are named
with the reason, and the printed command is without them.
Options of the converters are in [checkpoints.md](checkpoints.md), those of the old server in
[serving.md](serving.md).
"""
_TABLES: Mapping[str, Mapping[str, str]] = {
    "Flags": FLAGS,
    "Variables": VARIABLES,
    "Files and folders": FILES,
    "Fields of the pod profile": FIELDS,
    "Controls and messages of the page": CONTROLS,
}


def render_page() -> str:
    """Return the page as Markdown."""
    lines = [_HEAD, "## Commands and scripts", "", "| there | here | |", "|---|---|---|"]
    lines += [row for old in COMMANDS for row in _rows(old)]
    for title, rows in _TABLES.items():
        lines += ["", f"## {title}", "", "| there | here |", "|---|---|"]
        lines += [f"| `{name}` | {text} |" for name, text in rows.items()]
    return "\n".join(lines) + "\n"


def _rows(old: LegacyCommand) -> Iterator[str]:
    """Yield one row for all spellings, or one for each where the replacement depends on the arguments."""
    by_answer: dict[tuple[str, ...], list[str]] = {}
    for printed in old.printed.splitlines():
        by_answer.setdefault(find_translations(printed)[-1].here, []).append(printed)
    later = "" if old.later is None else f"; not yet: {old.later}"
    for here, printed_all in by_answer.items():
        there = "<br>".join(f"`{_cell(printed)}`" for printed in printed_all)
        yield f"| {there} | {'<br>'.join(f'`{_cell(command)}`' for command in here) or '-'} | {old.why}{later} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
