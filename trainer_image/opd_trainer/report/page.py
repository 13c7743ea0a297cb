"""One self-contained HTML file: no script, no font, no picture from anywhere else."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from opd_trainer.report.charts import charts, group_chart
from opd_trainer.report.headline import duration, headline
from opd_trainer.report.heat import HeatMap, heat_map, scale
from opd_trainer.report.reading import Group, RunData, read_run
from opd_trainer.report.records import SampleRecord

REPORT_FILE = "index.html"
TEXT_SHOWN = 1500


def write_report(run_directory: Path) -> Path:
    """Write <run>/report/index.html from <run>/logs and return its path.

    Raises ReportError when the directory holds no run, OSError when it cannot be written.
    """
    text = render(read_run(Path(run_directory)))
    target = Path(run_directory) / "report" / REPORT_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    # Somebody may be reading the last one.
    temporary = target.with_name(f".{REPORT_FILE}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, target)
    return target


def render(data: RunData) -> str:
    """The page of a run."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"nats": _nats, "when": _when, "shorten": _shorten}
    # The only markup that is not escaped is our own SVG.
    drawn = [(chart.title, chart.reading, Markup(chart.svg)) for chart in charts(data)]  # noqa: S704
    return environment.get_template("page.html.j2").render(
        summary=data.summary,
        figures=headline(data),
        charts=drawn,
        pairs=[(pair, _heat(pair.before), _heat(pair.after)) for pair in data.pairs],
        samples=[(record, _heat(record)) for record in data.latest],
        groups=_groups(data),
        last_metrics=_last_metrics(data),
        scale=scale(),
        configuration=_yaml(data.summary.configuration),
        duration=duration,
        data=data,
        logs_text=bool(data.pairs or data.latest),
    )


def _groups(data: RunData) -> list[tuple[str, list[Group], Markup | None]]:
    tables = []
    for title, kind, groups in (("data source", "source", data.by_source), ("teacher", "teacher", data.by_teacher)):
        if groups:
            svg = group_chart(data, kind)
            rows = sorted(groups.values(), key=lambda group: -group.samples)
            tables.append((title, rows, Markup(svg) if svg else None))  # noqa: S704
    return tables


def _last_metrics(data: RunData) -> list[tuple[str, float, float]]:
    rows = []
    for name in data.metric_names():
        _, values = data.series(name)
        rows.append((name, values[0], values[-1]))
    return rows


def _heat(record: SampleRecord) -> HeatMap | None:
    return heat_map(record.tokens) if record.tokens is not None and record.tokens.text else None


def _yaml(document: dict[str, Any]) -> str:
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=110) if document else ""


def _nats(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if seconds > 0 else "–"


def _shorten(text: str) -> str:
    return text if len(text) <= TEXT_SHOWN else f"{text[:TEXT_SHOWN]}… ({len(text) - TEXT_SHOWN} more characters)"
