"""axe on a page in Chromium."""

import pathlib
from collections.abc import Sequence

import playwright.sync_api as pw

AXE = pathlib.Path(__file__).parents[3] / "frontend" / "node_modules" / "axe-core" / "axe.min.js"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


CONTRAST = ["color-contrast"]
"""The one rule whose answer depends on the colours."""


def violations(page: pw.Page, rules: Sequence[str] = RULES) -> list[str]:
    """Return the violations that axe finds, one line per rule and element."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    run = "rules => axe.run(document, {runOnly: rules, resultTypes: ['violations']})"  # no selectors of what passes
    found = page.evaluate(run, list(rules))["violations"]
    return [f"{rule['impact']} {rule['id']}: {node['html'][:160]}" for rule in found for node in rule["nodes"]]
