"""Write the page of a plan's report."""

from pathlib import Path

from plait.errors import ConfigError
from plait.planner.plan import PlanReport
from plait.planner.report.page import build_page
from plait.planner.timeline import build_layer_charts


def check_can_write(path: Path) -> None:
    """Refuse before anything is searched what could not be written afterwards.

    Raises:
        ConfigError: another kind of file, no such folder, or no plotly.
    """
    if path.suffix not in (".html", ".htm"):
        raise ConfigError(f"{path}: a report is an .html file", hint=f"{path.stem}.html")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}", hint="make it first")
    _load_plotly_js()


def write_report(report: PlanReport, path: Path) -> None:
    """One page with everything that it shows; equal reports give equal files.

    Raises:
        ConfigError: plotly is not installed, or the file cannot be written.
    """
    check_can_write(path)
    page = build_page(report, build_layer_charts(report.best), _load_plotly_js())
    try:
        path.write_text(page, encoding="utf-8", newline="\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def _load_plotly_js() -> str:
    # Only here: nobody who wants no page has to have it.
    try:
        from plotly.offline import get_plotlyjs  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(
            "a report needs plotly, which is not installed", hint="pip install 'plait[report]'"
        ) from error
    return str(get_plotlyjs())
