"""The page in Chromium: it renders, answers, and is read by day, by night and on a phone."""

import base64
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.planner.report import write_report
from tests.support.planned_report import EVIL, build_report

pytest.importorskip("plotly", reason="plotly is not installed")
pytest.importorskip("selenium", reason="selenium is not installed")

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="no chromium and chromedriver (Debian: chromium, chromium-driver)"
)

PHONE, DESK = 390, 1280
READABLE = 4.5
"""Contrast of text that everyone reads (WCAG 2, level AA)."""


class Browser:
    """One page in one browser."""

    def __init__(self, driver: Any, page: Path, shots: Path) -> None:
        self.driver, self.page, self.shots = driver, page, shots

    def open(self, *, scheme: str = "light", width: int = DESK) -> None:
        """Load the page anew and wait until its charts are drawn."""
        self.emulate(scheme, width)
        self.driver.get(self.page.as_uri())
        self.wait_until(lambda: self.run("return document.documentElement.dataset.drawn"))

    def emulate(self, scheme: str, width: int) -> None:
        """From now on it is day or night, on a screen of that width."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        screen = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)

    def wait_until(self, is_so: Callable[[], object]) -> None:
        """For a minute at most."""
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.driver, 60, poll_frequency=0.05).until(lambda _: is_so())

    def run(self, script: str, *arguments: object) -> Any:
        """What JavaScript returns."""
        return self.driver.execute_script(script, *arguments)

    def press(self, selector: str) -> None:
        """Click the first element that `selector` finds."""
        self.run("document.querySelector(arguments[0]).click()", selector)

    def point_at(self, selector: str) -> None:
        """Move the mouse to the middle of an element."""
        box = self.run(
            "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]", selector,
        )  # fmt: skip
        for shift in (2, 0):
            moved = {"type": "mouseMoved", "x": box[0] + shift, "y": box[1]}
            self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", moved)

    def shoot(self, name: str) -> bytes:
        """The whole page as a picture, also kept as a file."""
        size = self.run("return [innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
        asked = {"captureBeyondViewport": True, "clip": clip}
        picture = base64.b64decode(self.driver.execute_cdp_cmd("Page.captureScreenshot", asked)["data"])
        (self.shots / f"{name}.png").write_bytes(picture)
        return picture


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    folder = tmp_path_factory.mktemp("report")
    write_report(build_report(EVIL), folder / "report.html")
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for switch in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"):
        options.add_argument(switch)
    options.add_argument(f"--user-data-dir={folder / 'profile'}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    yield Browser(driver, folder / "report.html", folder)
    driver.quit()


def test_it_renders_at_once_from_disk_without_an_error_or_a_request(browser: Browser) -> None:
    browser.open()
    assert browser.driver.get_log("browser") == []
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    drawn = browser.run(
        "return [...document.querySelectorAll('.chart')].map(c => c.querySelectorAll('.bars path').length)"
    )
    assert len(drawn) == 3
    assert min(drawn) > 5
    assert browser.run("return document.title").startswith("plait plan: <script>document.title")


def test_hovering_tells_what_a_bar_is(browser: Browser) -> None:
    browser.open()
    for chart, words in (("times", "tp 1:"), ("memory", "GB"), ("timeline", "from")):
        browser.point_at(f"#{chart} .bars .point path")
        told = browser.run("return document.querySelector(`#${arguments[0]} .hoverlayer`).textContent", chart)
        assert words in told


def test_a_heading_sorts_up_and_then_down(browser: Browser) -> None:
    browser.open()
    heads = browser.run("return [...document.querySelectorAll('#plans-section th')].slice(0, 12).map(h => h.innerText)")
    column = 1 + next(place for place, head in enumerate(heads) if head.startswith("step"))
    cells = f"#plans-section > .wide td:nth-child({column})"
    rows = f"return [...document.querySelectorAll('{cells}')].map(c => +c.dataset.sort)"
    first = browser.run(rows)
    browser.press(f"#plans-section th:nth-child({column}) button")
    assert browser.run(rows) == sorted(first) != first
    browser.press(f"#plans-section th:nth-child({column}) button")
    assert browser.run(rows) == sorted(first, reverse=True)
    sorted_by = "return document.querySelector('#plans-section th[aria-sort=descending]').cellIndex"
    assert browser.run(sorted_by) == column - 1


def test_the_timeline_zooms_and_comes_back(browser: Browser) -> None:
    browser.open()
    see = "return document.getElementById('timeline').layout.xaxis.range.map(Number)"
    whole = browser.run(see)
    browser.press("[data-zoom=in]")
    low, high = browser.run(see)
    assert high - low == pytest.approx((whole[1] - whole[0]) / 2)
    browser.press("[data-zoom=backward]")
    assert browser.run(see)[0] > whole[0]
    browser.press("[data-zoom=whole]")
    assert browser.run(see) == pytest.approx(whole)


def test_buttons_choose_a_view_and_a_rank(browser: Browser) -> None:
    browser.open()
    see = "return document.getElementById('times').layout.yaxis.title.text"
    assert browser.run(see).startswith("time of a step")
    browser.press('[data-chart=times][data-view="One layer"]')
    assert browser.run(see).startswith("time of a layer")
    browser.press(".rank[data-rank='2']")
    chosen = browser.run("return [...document.querySelectorAll('.part.chosen')].map(p => p.dataset.ranks)")
    assert len(chosen) > 20
    assert all("2" in ranks.split() for ranks in chosen)
    browser.press(".rank[data-rank='2']")
    assert browser.run("return document.querySelectorAll('.part.chosen, .choosing').length") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_read_by_day_and_by_night(browser: Browser, scheme: str) -> None:
    browser.open(scheme=scheme)
    paper = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (_brightness(paper) > 0.5) == (scheme == "light")
    for selector, what in (
        (".verdict", "color"), (".asked", "color"), ("th button", "color"), ("summary", "color"), ("small", "color"),
        ("#times .xtick text", "fill"), ("#memory .ytitle", "fill"), ("#timeline .ytick text", "fill"),
        ("#times .annotation text", "fill"),
    ):  # fmt: skip
        ink = browser.run(f"return getComputedStyle(document.querySelector(arguments[0])).{what}", selector)
        assert _contrast(ink, paper) >= READABLE, selector
    assert browser.shoot(scheme).startswith(b"\x89PNG")


def test_a_change_to_night_is_followed_without_a_reload(browser: Browser) -> None:
    browser.open(scheme="light")
    see = "return getComputedStyle(document.querySelector('#times .xtick text')).fill"
    assert _brightness(browser.run(see)) < 0.1
    browser.emulate("dark", DESK)
    browser.wait_until(lambda: _brightness(browser.run(see)) > 0.5)


def test_a_phone_scrolls_down_only(browser: Browser) -> None:
    browser.open(width=PHONE)
    assert browser.run("return document.documentElement.scrollWidth") <= PHONE
    wide = browser.run(
        "return [...document.querySelectorAll('.chart, h1, p, figure, .legend')]"
        ".filter(e => e.getBoundingClientRect().right > innerWidth).length"
    )
    assert wide == 0
    sizes = browser.run(
        "return [...document.querySelectorAll('p, td, figcaption, .chart .xtick text')]"
        ".map(e => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 11
    assert browser.shoot("phone").startswith(b"\x89PNG")


def _channels(color: str) -> list[float]:
    return [float(part) / 255 for part in color[color.index("(") + 1 : color.index(")")].split(",")[:3]]


def _brightness(color: str) -> float:
    linear = [
        (channel / 12.92) if channel <= 0.04 else ((channel + 0.055) / 1.055) ** 2.4 for channel in _channels(color)
    ]
    return sum(weight * channel for weight, channel in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(first: str, second: str) -> float:
    low, high = sorted((_brightness(first), _brightness(second)))
    return (high + 0.05) / (low + 0.05)
