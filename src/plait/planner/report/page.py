"""The page put together: sections, figures, and everything that they need inlined."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from html import escape
from pathlib import Path

from plait.planner.plan import PlanReport
from plait.planner.report import sections
from plait.planner.report.memory import build_memory_views
from plait.planner.report.sections import Views
from plait.planner.report.timeline import build_timeline
from plait.planner.report.times import build_time_views
from plait.planner.timeline import LayerChart

_HERE = Path(__file__).parent


def build_page(report: PlanReport, layers: Sequence[LayerChart], plotly_js: str) -> str:
    """The page as text; nothing in it is read from anywhere else, and browsers are told to refuse if it were."""
    views: dict[str, Views] = {
        "times": build_time_views(report),
        "memory": build_memory_views(report),
        "timeline": {"Forward and backward": build_timeline(layers)},
    }
    page_js = (_HERE / "page.js").read_text()
    scripts = (plotly_js.replace("\r\n", "\n"), page_js)
    title = f"plait plan: {report.name} on {report.cluster.num_devices} x {report.cluster.hardware.name}"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_build_policy(scripts)}">
<title>{escape(title)}</title>
<style>
{(_HERE / "page.css").read_text()}</style>
</head>
<body>
{_HATCH}
<main>
{sections.build_head(report)}
{sections.build_times(report, views["times"])}
{sections.build_memory(views["memory"])}
{sections.build_timeline(layers)}
{sections.build_breakdown(report)}
{sections.build_ownership(report)}
{sections.build_plans(report)}
{sections.build_provenance(report)}
</main>
<script type="application/json" id="figures">{_dump(views)}</script>
<script>{scripts[0]}</script>
<script>{scripts[1]}</script>
</body>
</html>
"""


_HATCH = (
    '<svg width="0" height="0" aria-hidden="true" style="position:absolute"><defs><pattern id="hatch" width="6" '
    'height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="2" height="6" fill="#FFFFFF" '
    'fill-opacity="0.45"/></pattern></defs></svg>'
)


def _build_policy(scripts: Sequence[str]) -> str:
    """Only these scripts run, and nothing is fetched, whatever a name or a library tries."""
    hashes = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )


def _dump(views: Mapping[str, Views]) -> str:
    """JSON that ends no script element."""
    return json.dumps(views, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
