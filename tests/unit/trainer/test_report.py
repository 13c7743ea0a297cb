"""The HTML report: what it reads, what it shows, and that it stands alone."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from opd_testing.report_run import AFTER, BEFORE, write_run
from typer.testing import CliRunner

from opd_cli.main import app
from opd_trainer.report import ReportError, write_report
from opd_trainer.report.charts import POINTS, charts, running_mean, thinned
from opd_trainer.report.headline import duration, headline
from opd_trainer.report.heat import TOKENS, colour, heat_map
from opd_trainer.report.page import render
from opd_trainer.report.reading import LATEST, RunData, read_run
from opd_trainer.report.records import MetricsRecord, RunSummary, SampleRecord, TokenRecords


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return write_report(run).read_text(encoding="utf-8")


def append(directory: Path, name: str, *lines: str) -> None:
    with (directory / "logs" / name).open("a", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)


class Text(HTMLParser):
    """Visible text and the tags of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: Counter[str] = Counter()
        self.links: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


# -- the page ------------------------------------------------------------------------------------------------------------


def test_the_page_shows_every_part(page: str) -> None:
    text = Text(page).text
    for heading in (
        "Curves",
        "Before and after",
        "Samples",
        "By source and teacher",
        "Failures",
        "Configuration and versions",
    ):
        assert heading in text
    for chart in (
        "Reverse KL",
        "Loss",
        "Response length",
        "Entropy",
        "Mass and overlap",
        "Staleness",
        "Where a step's time goes",
    ):
        assert chart in text
    assert "TeacherUnreachable" in text
    assert "torch 2.14.1" in re.sub(r" +", " ", text) or "2.14.1" in text
    assert "1.239 → 0.142" in text


def test_the_page_needs_nothing_from_outside(page: str) -> None:
    parsed = Text(page)
    assert not {"script", "link", "iframe", "img"} & set(parsed.tags)
    assert [link for link in parsed.links if not link.startswith("#")] == []
    assert re.findall(r"@import|url\((?!#)", page) == []


def test_ids_that_svg_refers_to_are_unique_on_the_page(page: str) -> None:
    referred = set(re.findall(r'(?:url\(#|href="#)([^")]+)', page))
    defined = Counter(re.findall(r'\bid="([^"]+)"', page))
    assert referred
    assert {name: defined[name] for name in referred if defined[name] != 1} == {}


def test_the_first_and_last_answer_of_a_held_out_prompt_stand_side_by_side(run: Path) -> None:
    data = read_run(run)
    assert [(pair.before.step, pair.after.step) for pair in data.pairs] == [(0, 60)] * 3
    assert [pair.before.response for pair in data.pairs] == list(BEFORE), "in the order of the file"
    assert [pair.after.response for pair in data.pairs] == list(AFTER)


def test_text_of_models_is_never_markup(tmp_path: Path) -> None:
    write_run(tmp_path, steps=4)
    hostile = '<script>alert(1)</script>"><img src=x>'
    record = SampleRecord(
        step=4, time=1.0, attempt=1, sample_id=999, group_id=9, data_source=hostile, teacher="t", prompt_length=1,
        response_length=1, finish_reason="stop", prompt=hostile, response=hostile,
        tokens=TokenRecords([hostile], [1], [-1.0], [-2.0], [1]),
    )  # fmt: skip
    append(tmp_path, "samples.jsonl", record.to_json())
    html = write_report(tmp_path).read_text(encoding="utf-8")
    assert "script" not in Text(html).tags
    assert "img" not in Text(html).tags
    assert "&lt;script&gt;" in html


def test_a_run_without_samples_says_how_to_get_them(tmp_path: Path) -> None:
    write_run(tmp_path, steps=4)
    (tmp_path / "logs" / "samples.jsonl").unlink()
    text = Text(write_report(tmp_path).read_text(encoding="utf-8")).text
    assert "diagnostics.logResponses: true" in text
    assert "diagnostics.tokenStats: true" in text
    assert "training.evaluation" in Text(render(data_with(1.0))).text


def test_a_failed_run_says_why_at_the_top() -> None:
    summary = RunSummary("math", "a", 1, 10.0, 20.0, 0, 8, outcome="Failed", message="teacher math never answered")
    text = Text(render(RunData(summary, [], []))).text
    assert text.index("teacher math never answered") < text.index("No step is finished yet")


def test_the_report_is_written_anew_in_one_move(tmp_path: Path) -> None:
    write_run(tmp_path, steps=4)
    assert write_report(tmp_path) == write_report(tmp_path) == tmp_path / "report" / "index.html"
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["index.html"]


def test_the_report_does_not_grow_with_the_run(tmp_path: Path) -> None:
    small = write_report(write_run(tmp_path / "small", steps=40)).stat().st_size
    large = write_report(write_run(tmp_path / "large", steps=320)).stat().st_size
    assert large < 3 * small


# -- reading ---------------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"summary\.json"):
        write_report(tmp_path)


def test_a_broken_summary_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "summary.json").write_text("{")
    with pytest.raises(ReportError, match=r"summary\.json cannot be read"):
        read_run(tmp_path)


def test_half_a_line_of_a_killed_attempt_is_skipped_and_counted(tmp_path: Path) -> None:
    write_run(tmp_path, steps=4)
    append(tmp_path, "metrics.jsonl", '{"step": 5, "opd_rev')
    append(tmp_path, "samples.jsonl", '{"step": 5, "sample_id"', '{"step": 1}')
    data = read_run(tmp_path)
    assert (len(data.steps), data.unreadable_lines) == (4, 3)


def test_of_a_step_that_was_repeated_the_last_record_counts(tmp_path: Path) -> None:
    write_run(tmp_path, steps=4)
    append(tmp_path, "metrics.jsonl", MetricsRecord(3, 1.0, 3, {"loss": 77.0}).to_json())
    steps, losses = read_run(tmp_path).series("loss")
    assert steps == [1, 2, 3, 4]
    assert losses[2] == 77.0


def test_only_the_newest_samples_are_kept_and_those_with_tokens_first(run: Path) -> None:
    data = read_run(run)
    assert len(data.latest) == LATEST
    assert data.latest[0].step == 60
    assert all(record.tokens is not None for record in data.latest)
    assert data.samples == 240


def test_groups_compare_their_first_and_last_steps(run: Path) -> None:
    group = read_run(run).by_source["gsm8k"]
    first, last = group.reverse_kl(first=True), group.reverse_kl(first=False)
    assert first is not None
    assert last is not None
    assert first > 0.8 > 0.2 > last > 0


def test_records_survive_json() -> None:
    sample = SampleRecord(1, 2.0, 1, 3, 4, "a", "t", 5, 6, "stop", tokens=TokenRecords(["x"], [1], [None], [-1.5], [1]))
    summary = RunSummary("n", "s", 1, 1.0, 2.0, 3, 4, versions={"torch": "2"})
    assert SampleRecord.from_document(json.loads(sample.to_json()) | {"later": 1}) == sample
    assert RunSummary.from_document(json.loads(summary.to_json()) | {"later": 1}) == summary


def test_numbers_that_json_lacks_are_left_out() -> None:
    record = MetricsRecord(1, 2.0, 1, {"loss": float("nan"), "reward": 1.0})
    assert MetricsRecord.from_document(json.loads(record.to_json())).metrics == {"reward": 1.0}


# -- numbers -----------------------------------------------------------------------------------------------------------


def data_with(*values: float, held_out: tuple[float, ...] = ()) -> RunData:
    steps = [MetricsRecord(i + 1, 0.0, 1, {"opd_reverse_kl": value}) for i, value in enumerate(values)]
    evaluations = [MetricsRecord(i * 10, 0.0, 1, {"eval_opd_reverse_kl": value}) for i, value in enumerate(held_out)]
    return RunData(RunSummary("n", "s", 1, 0.0, 0.0, len(values), len(values)), steps, evaluations)


def test_the_headline_prefers_held_out_prompts() -> None:
    figure = headline(data_with(9.0, 8.0, held_out=(1.0, 0.25)))[0]
    assert (figure.value, figure.tone) == ("1.000 → 0.250", "good")
    assert "25% of the start" in figure.note


def test_the_headline_takes_training_batches_where_there_is_no_evaluation() -> None:
    figure = headline(data_with(1.0, 1.5))[0]
    assert (figure.value, figure.tone) == ("1.000 → 1.500", "bad")


def test_charts_without_records_are_left_out() -> None:
    assert [chart.title for chart in charts(data_with(1.0, 0.5))] == ["Reverse KL"]


def test_red_is_where_the_teacher_likes_a_token_less() -> None:
    def rgb(gap: float) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", colour(gap))]

    assert rgb(0.0) == [255, 255, 255]
    red, blue = rgb(-2.0), rgb(2.0)
    assert red[0] > red[2]
    assert blue[2] > blue[0]
    assert rgb(-4.0)[1] < rgb(-1.0)[1] < rgb(-0.1)[1]
    assert rgb(-4.0) == rgb(-400.0)


def test_a_heat_map_marks_what_was_not_trained_and_hides_what_is_too_long() -> None:
    heat = heat_map(TokenRecords(["a\n", "b"], [1, 2], [-1.0, -1.0], [-3.0, None], [1, 0]))
    assert [(token.text, token.trained, token.breaks) for token in heat.tokens] == [("a⏎", True, 1), ("b", False, 0)]
    assert "teacher − student -2.000 nats" in heat.tokens[0].title
    assert heat.tokens[1].background == "transparent"
    many = TOKENS + 5
    assert heat_map(TokenRecords(["x"] * many, [0] * many, [-1.0] * many, [-1.0] * many)).hidden == 5


def test_long_curves_are_thinned_by_means_and_keep_their_last_step() -> None:
    steps, values = thinned(list(range(1, 1801)), [float(i) for i in range(1800)])
    assert len(steps) == POINTS
    assert (steps[-1], values[0]) == (1800, 1.0)
    assert running_mean([1.0, 2.0, 3.0, 4.0], 2) == [1.0, 1.5, 2.5, 3.5]


@pytest.mark.parametrize(("seconds", "text"), [(7, "7 s"), (125, "2 min 05 s"), (7384, "2 h 03 min")])
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_opd_report_prints_the_path_and_refuses_other_folders(run: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(run)])
    assert (done.exit_code, done.stdout.strip()) == (0, str(run / "report" / "index.html"))
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code == 1


def test_a_summary_older_than_the_metrics_does_not_hide_the_last_steps(tmp_path: Path) -> None:
    write_run(tmp_path, steps=4)
    append(tmp_path, "metrics.jsonl", MetricsRecord(9, 1.9e9, 2, {"loss": 1.0}).to_json())
    summary = read_run(tmp_path).summary
    assert (summary.step, summary.updated) == (9, 1.9e9)


def test_one_evaluation_says_that_a_second_is_awaited() -> None:
    text = Text(render(data_with(1.0, held_out=(1.0,)))).text
    assert "it takes two evaluations" in text


def test_a_curve_that_is_zero_all_along_is_drawn_from_zero_to_one() -> None:
    data = data_with()
    data.steps = [MetricsRecord(step, 0.0, 1, {"staleness": 0.0}) for step in (1, 2, 3)]
    (chart,) = charts(data)
    assert "1.0" in chart.svg
    assert "−0.0" not in chart.svg
