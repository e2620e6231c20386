"""Reports in a real browser: what a reader sees and does, with the numbers that the same command prints as JSON.

`make test-browser`; screenshots are in build/browser. Needs Chromium, on Debian `apt-get install chromium`.
"""

import json
import re
import runpy
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from support.chromium import CTRL, Chromium, Page, chromium

ROOT = Path(__file__).parents[2]
SHOTS = ROOT / "build" / "browser"
PICTURES = runpy.run_path(str(ROOT / "docs" / "report_picture.py"))
COMMANDS, FILES = PICTURES["COMMANDS"], PICTURES["FILES"]
OPEN_S, MOST_BYTES = 3.0, 15e6
"""A report of 8,192 sequences on 1,024 GPUs opens in that time, and is no larger than that."""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="no Chromium here; on Debian: apt-get install chromium"),
]


class Made(NamedTuple):
    """The report of a command, and what the command printed."""

    path: Path
    printed: dict


@pytest.fixture(scope="module")
def browser():
    with Chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def made(tmp_path_factory, seqloom_here):
    """Run each command once, in the order of their names here: simulate reads what plan wrote."""
    folder, results = tmp_path_factory.mktemp("reports"), {}
    for name, command in COMMANDS.items():
        done = seqloom_here(*shlex.split(command), folder=folder)
        assert done.returncode == 0, done.stderr
        results[name] = Made(folder / FILES[name], json.loads(done.stdout))
    return results


@pytest.fixture
def opened(browser):
    """Open reports, and fail at the end if a page logged an error or asked for anything."""
    pages: list[Page] = []

    def open_page(path: Path, **options) -> Page:
        pages.append(browser.open(path, **options))
        return pages[-1]

    yield open_page
    for page in pages:
        assert page.problems() == []
        page.close()


def test_a_page_that_logs_or_asks_is_noticed(tmp_path, browser):
    page = tmp_path / "bad.html"
    page.write_text("<script>console.error('x'); missing()</script><img src='http://127.0.0.1:9/pixel.png'>")
    opened = browser.open(page)
    assert {problem.split(":")[0] for problem in opened.problems()} >= {"console", "exception", "request"}
    opened.close()


def figures(page: Page) -> dict[str, str]:
    """The cards of a page: the figure that each shows, and its text."""
    cards = (
        "[...document.querySelectorAll('.card')].map((one) => [one.dataset.figure, one.querySelector('b').textContent])"
    )
    return dict(page.evaluate(cards))


def shown(ms: float) -> str:
    """A time as a report writes it."""
    unit, value = ("s", ms / 1e3) if ms >= 1e3 else ("ms", ms) if ms >= 1 else ("us", ms * 1e3)
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def assert_cards(page: Page, wanted: dict) -> None:
    """The cards of a step have the figures of the JSON, rounded as people read them."""
    cards = figures(page)
    assert cards["step_ms"] == shown(wanted["step_ms"])
    assert cards["gap"] == ("not proven" if wanted["gap"] is None else f"{100 * wanted['gap']:.1f} %")
    for key in ("idle_share", "comm_share"):
        assert cards[key] == f"{100 * wanted[key]:.1f} %"
    assert cards["peak_memory_gib"] == f"{wanted['peak_memory_gib']:.1f} GiB"
    assert cards["rounds"] == f"{wanted['rounds']:,}"
    if "tokens" in wanted:  # of one plan, not of a comparison
        assert cards["tokens"] == f"{wanted['tokens']:,}"


def first(printed: dict, planner: str) -> dict:
    """The figures of a planner's first batch, with its gap."""
    figures = {key: values[0] for key, values in printed["planners"][planner].items()}
    return figures | {"gap": figures["step_ms"] / figures["bound_ms"] - 1}


@pytest.mark.parametrize("name", ["plan", "simulate"])
def test_the_figures_of_a_step_are_those_of_the_command(made, opened, name):
    page = opened(made[name].path)
    assert_cards(page, made[name].printed)
    page.screenshot(SHOTS / f"{name}.png")
    rows = page.evaluate("document.querySelectorAll('#holds tbody tr').length")
    held = page.evaluate("Number(document.querySelector('#holds tbody tr').cells[3].textContent)")
    assert rows >= 1 and held >= 1


def test_planners_are_compared_and_switched(made, opened):
    page, printed = opened(made["compare"].path), made["compare"].printed
    fastest = min(printed["planners"], key=lambda name: printed["planners"][name]["step_ms"][0])
    assert page.evaluate("document.querySelector('#step').dataset.name") == fastest
    page.screenshot(SHOTS / "compare.png")
    rows = page.evaluate(
        "[...document.querySelectorAll('#planners tbody tr')].map((row) => [...row.cells].map((c) => c.textContent))"
    )
    assert [row[0] for row in rows] == list(printed["planners"])
    for number, (name, step, *_) in enumerate(rows):
        assert step == shown(first(printed, name)["step_ms"])
        page.click(f"[data-step='{number}']")
        assert page.evaluate("document.querySelector('#step').dataset.name") == name
        assert page.evaluate("document.querySelector('[aria-pressed=true]').textContent") == name
        assert_cards(page, first(printed, name))
    page.click("#same-axis")
    slowest = max(first(printed, name)["step_ms"] for name in printed["planners"])
    assert view(page)[1] == pytest.approx(slowest * 1e6, rel=1e-6)


def test_the_demo_shows_all_planners(made, opened):
    page, printed = opened(made["demo"].path), made["demo"].printed
    assert page.evaluate("document.querySelectorAll('[data-step]').length") == len(printed["planners"])
    page.click("[data-step='0']")
    assert_cards(page, first(printed, "static"))
    page.screenshot(SHOTS / "demo.png")


def test_a_run_shows_its_steps(made, opened):
    page, printed = opened(made["train"].path), made["train"].printed
    cards = figures(page)
    assert cards["steps"] == "6" and float(cards["final_loss"]) == pytest.approx(printed["final_loss"], abs=1e-4)
    records = [json.loads(line) for line in (made["train"].path.parent / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "measured_ms" in record]
    assert cards["step_ms"] == shown(steps[-1]["predicted_ms"])
    box = page.box("#run svg")
    page.mouse("mouseMoved", box["x"] + box["width"] - 10, box["y"] + 100)
    tip = page.evaluate("document.querySelector('#tip').textContent").splitlines()
    assert tip == [
        "step 6",
        f"measured {shown(steps[-1]['measured_ms'])}",
        f"predicted {shown(steps[-1]['predicted_ms'])}",
    ]
    page.screenshot(SHOTS / "train.png")


def view(page: Page) -> tuple[float, float]:
    """The part of the step that the timeline shows, ns."""
    return tuple(map(float, page.evaluate("(({ from, to }) => [from, to])(document.querySelector('canvas').dataset)")))


def test_zoom_pan_and_hover(made, opened):
    page, printed = opened(made["plan"].path), made["plan"].printed
    whole = view(page)
    assert whole == (0, pytest.approx(printed["step_ms"] * 1e6))
    page.click("#zoom-in")
    zoomed = view(page)
    assert zoomed[1] - zoomed[0] == pytest.approx(whole[1] / 2) and sum(zoomed) == pytest.approx(whole[1])
    box = page.box("canvas")
    x, y = box["x"] + box["width"] / 2, box["y"] + 60
    page.mouse("mousePressed", x, y, button="left", clickCount=1)
    page.mouse("mouseMoved", x + 100, y, button="left", buttons=1)
    page.mouse("mouseReleased", x + 100, y, button="left", clickCount=1)
    panned = view(page)
    assert panned[0] < zoomed[0] and panned[1] - panned[0] == pytest.approx(zoomed[1] - zoomed[0])
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-120, modifiers=CTRL)
    page.wait(f"Number(document.querySelector('canvas').dataset.to) < {panned[1] - 1}")
    nearer = view(page)
    assert panned[0] < nearer[0] and nearer[1] < panned[1]
    page.click("#reset")
    assert view(page) == whole
    for key, changed in (("+", True), ("0", False)):
        page.evaluate("document.querySelector('canvas').focus()")
        page.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
        assert (view(page) != whole) == changed


def test_a_block_says_what_it_is(made, opened):
    page = opened(made["plan"].path)
    step = page.evaluate("JSON.parse(document.querySelector('#data').textContent).steps[0]")
    kinds = page.evaluate("JSON.parse(document.querySelector('#data').textContent).kinds")
    runs, box = step["runs"], page.box("canvas")
    widest = max(range(len(runs["rank"])), key=lambda k: runs["length"][k] * (runs["group"][k] >= 0))
    middle = (runs["start"][widest] + runs["length"][widest] / 2) / step["step_ns"]
    left, right, top, row = 64, 8, 38, min(22, 400 / step["ranks"])  # margins of report.js
    x = box["x"] + left + middle * (box["width"] - left - right)
    page.mouse("mouseMoved", x, box["y"] + top + (runs["rank"][widest] + 0.5) * row)
    assert not page.evaluate("document.querySelector('#tip').hidden")
    tip = page.evaluate("document.querySelector('#tip').textContent").splitlines()
    assert tip[0] == f"GPU {runs['rank'][widest]}: {kinds[runs['kind'][widest]]}"
    assert tip[1].startswith(shown(runs["length"][widest] / 1e6)) and f"round {runs['round'][widest]}" in tip
    held = [group for group in step["groups"] if group["round"] == runs["round"][widest]]
    assert re.search(r"tokens of \d+ sequence", tip[-1]) and held
    page.mouse("mouseMoved", 5, 5)
    assert page.evaluate("document.querySelector('#tip').hidden")


def test_groups_of_one_gpu(made, opened):
    page = opened(made["plan"].path)
    page.evaluate("document.querySelector('#of-gpu').value = '3'")
    page.evaluate("document.querySelector('#of-gpu').dispatchEvent(new Event('input'))")
    names = page.evaluate("[...document.querySelectorAll('#holds tbody tr')].map((row) => row.cells[1].textContent)")
    assert names and all(first <= 3 <= last for first, last in map(rank_range, names))


def rank_range(text: str) -> tuple[int, int]:
    """The first and the last GPU of "GPU 3" or "GPUs 0-7"."""
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    return numbers[0], numbers[-1]


def contrast(page: Page, selector: str) -> float:
    """The contrast of an element's text with the page, as WCAG computes it."""
    script = """((one) => {
      const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
      const light = (text) => text.match(/[\\d.]+/g).slice(0, 3).map((v) => linear(v / 255))
        .reduce((sum, v, k) => sum + v * [0.2126, 0.7152, 0.0722][k], 0);
      const [a, b] = [getComputedStyle(one).color, getComputedStyle(document.body).backgroundColor].map(light);
      return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    })"""
    return page.evaluate(f"{script}(document.querySelector({json.dumps(selector)}))")


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390], ids=["wide", "phone"])
def test_it_fits_and_can_be_read(made, opened, name, dark, width):
    page = opened(made[name].path, width=width, height=844, dark=dark, phone=width == 390)
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out to the right"
    assert min(contrast(page, selector) for selector in ("h1", "p", "td", ".card span", ".legend span")) >= 4.5
    red, green, blue = map(
        int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]
    )
    assert (red + green + blue < 120) == dark
    drawn = """new Set(new Uint32Array(document.querySelector('canvas').getContext('2d').getImageData(
        0, 0, document.querySelector('canvas').width, document.querySelector('canvas').height).data.buffer)).size"""
    assert page.evaluate(drawn) > 5, "the timeline has colours"
    page.screenshot(SHOTS / f"{name}-{'dark' if dark else 'light'}-{width}.png")


def test_the_picture_of_the_readme_is_drawn(tmp_path):
    drawn = PICTURES["draw"](tmp_path / "report.png")
    assert drawn == {"chosen": "flex", "step": "3.19 s", "above the bound": "1.1 %"}, "draw docs/report.png again"


def test_the_page_shows_the_report_of_every_command():
    page = (ROOT / "docs" / "report.md").read_text()
    assert re.findall(r"\(reports/(\w+)\.png\)", page) == list(COMMANDS)
    assert all((ROOT / "docs" / "reports" / f"{name}.png").stat().st_size > 10_000 for name in COMMANDS)


def test_a_large_step_opens_at_once(tmp_path, seqloom_here, opened):
    size = "--lengths commoncrawl --max-length 131072 --batch-size 8192 --planners static,flex,zones"
    command = f"compare {size} --cluster 128x8xH200 --model llama3-8b --sharding hybrid --html large.html"
    done = seqloom_here(*shlex.split(command), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "large.html"
    assert path.stat().st_size < MOST_BYTES
    pages = [opened(path) for _ in range(3)]  # other work on the machine only makes one slower
    timing = "performance.timing.loadEventEnd - performance.timing.navigationStart"
    assert min(page.evaluate(timing) for page in pages) < 1e3 * OPEN_S
    pages[0].click("[data-step='0']")
    pages[0].screenshot(SHOTS / "large.png", height=1200)
