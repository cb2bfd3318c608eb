"""Take the README's picture: the page of a running job once its verdict is confirmed.

Usage: start `make demo` (or any job with a fault) in one terminal, and this in another one.
"""

import argparse
import pathlib
import subprocess
import sys

import playwright.sync_api as pw

CHROMIUM = "/usr/bin/chromium"
LOST_STEPS = """steps => {
  const found = /lost in (\\d+) steps/.exec(document.querySelector("[data-testid=verdict]").textContent);
  return Number(found?.[1] ?? 0) >= steps;
}"""
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="demo", help="name of the job (default: demo)")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("docs/images/verdict.png"))
    parser.add_argument("--scheme", choices=("dark", "light"), default="dark")
    parser.add_argument("--width", type=int, default=1440)
    parser.add_argument("--steps", type=int, default=25, help="steps to wait after the onset (default: 25)")
    parser.add_argument("--wait-s", type=float, default=300, help="how long to wait for a confirmed verdict")
    return parser.parse_args()


def address_of(job: str) -> str:
    """The address that `megatronapp ui` prints."""
    command = [sys.executable, "-m", "megatronapp_common.cli", "ui", job, "--print"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def take(page: pw.Page, options: argparse.Namespace) -> None:
    """Wait for the verdict, choose its last step, and save the whole page."""
    panel = page.get_by_test_id("verdict")
    pw.expect(panel).to_contain_text("confirmed", timeout=options.wait_s * 1000)
    page.wait_for_function(LOST_STEPS, arg=options.steps, timeout=options.wait_s * 1000)
    panel.locator(".chip").last.click()
    pw.expect(page.get_by_test_id("timeline")).to_be_visible()
    page.evaluate("window.scrollTo(0, 0)")
    page.evaluate("() => document.fonts.ready.then(() => new Promise(requestAnimationFrame))")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=options.output, full_page=True)
    print(f"wrote {options.output}")


def main() -> int:
    options = parse_options()
    with pw.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        size: pw.ViewportSize = {"width": options.width, "height": 900}
        page = browser.new_page(viewport=size, color_scheme=options.scheme, reduced_motion="reduce")
        page.goto(address_of(options.job))
        take(page, options)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
