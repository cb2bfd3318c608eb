"""Take the pictures of MegaScope's page in docs/images from a model that serves: one new run, one picture of each view.

Usage: serve the model of the tutorial (`megatronapp run examples/scope-tiny-serve.yaml --detach`), then start this.
scripts/screenshot.py takes the picture of a verdict.
"""

import argparse
import pathlib
import re
import sys

import playwright.sync_api as pw
from screenshot import ARGUMENTS, CHROMIUM, address_of

VIEWS = {"layers": "1", "attention": "2", "probabilities": "3", "pca": "4"}
"""Names of pictures, and the keys that show the views."""
PROMPTS = ("def __init__(self, name): self.name", "class Reader: def read(self, path)")
TOKENS = 40
TOKEN = 12
"""The selected token: one in the middle of the first prompt's text."""
MOST_BYTES = 200_000
SIZE: pw.ViewportSize = {"width": 1240, "height": 860}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="scope-tiny-serve", help="name of the job (default: scope-tiny-serve)")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("docs/images"))
    parser.add_argument("--wait-s", type=float, default=120, help="how long to wait for the run and each picture")
    return parser.parse_args()


def generate(page: pw.Page) -> None:
    """Fill the form in with two prompts and a seed, and wait until they have been answered and scored."""
    page.get_by_label("Prompt 1").fill(PROMPTS[0])
    page.get_by_role("button", name="Add a prompt").click()
    page.get_by_label("Prompt 2").fill(PROMPTS[1])
    page.get_by_label("New tokens").fill(str(TOKENS))
    page.get_by_label("Seed").fill("7")
    page.get_by_role("button", name="Generate").click()
    pw.expect(page.get_by_test_id("run-state")).to_contain_text("Done:")
    second = page.get_by_test_id("tokens").get_by_role("button").nth(1)
    pw.expect(second).to_have_attribute("aria-label", re.compile("surprise"))


def take(page: pw.Page, name: str, folder: pathlib.Path) -> None:
    """Save what the window shows of a view, once its pictures are there."""
    page.locator("body").press(VIEWS[name])
    pw.expect(page.locator("[data-views] [data-state=loading]")).to_have_count(0)
    page.get_by_test_id("tokens").get_by_role("button").nth(TOKEN).click()
    page.locator("[data-views]").evaluate("node => node.scrollIntoView()")
    page.evaluate("() => document.fonts.ready.then(() => new Promise(requestAnimationFrame))")
    data = page.screenshot()
    if len(data) > MOST_BYTES:
        raise SystemExit(f"error: the picture {name} has {len(data)} bytes, over {MOST_BYTES}; show less of the page")
    path = folder / f"scope-{name}.png"
    path.write_bytes(data)
    print(f"wrote {path}, {len(data)} bytes")


def main() -> int:
    options = parse_options()
    options.output.mkdir(parents=True, exist_ok=True)
    with pw.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page(viewport=SIZE, color_scheme="dark", reduced_motion="reduce")
        page.set_default_timeout(options.wait_s * 1000)
        pw.expect.set_options(timeout=options.wait_s * 1000)
        page.goto(address_of(options.job))
        generate(page)
        page.locator("body").press("c")
        for name in VIEWS:
            take(page, name, options.output)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
