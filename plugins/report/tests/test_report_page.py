from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser

import pytest

from drivetrain import UserError
from drivetrain_report.config import ReportConfig
from drivetrain_report.report import ReportTracker, render_report

VOID = {"meta", "link", "wbr"}


class Page(HTMLParser):
    """Checks that tags are balanced, and collects text, attributes and the charts' numbers."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source, self.open, self.tags, self.attributes, self.texts = source, [], [], [], []
        self.feed(source)
        self.close()
        assert self.open == []
        found = re.search(r'<script type="application/json" id="points">(.*?)</script>', source, re.S)
        self.charts = json.loads(found.group(1))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def points(self, series: str) -> list:
        lines = [s for chart in self.charts for s in chart["s"] if s["n"] == series]
        return list(zip(lines[0]["x"], lines[0]["t"], strict=True))


def parsed(path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_curves_tiles_and_completions(run_dir):
    page = parsed(render_report(run_dir))
    assert page.points("training") == [(1, "0.367"), (2, "0.633"), (3, "0.900")]
    assert page.points("evaluation") == [(0, "12.5%"), (3, "75.0%")]
    assert page.points("train/odd_metric") == [(1, "2.00"), (2, "4.00"), (3, "6.00")]
    assert page.points("generate") == [(1, "0.30 s"), (2, "0.30 s"), (3, "0.30 s")]
    for words in ("grpo on tiny", "12.5% → 75.0%", "+62.5 points", "Response lengthtokens", "KL to the reference",
                  "Entropy", "Gradient norm", "Throughput", "Time by phase", "seconds a step", "odd_metric",
                  "Before, step 0", "After, step 3", "✓ right", "✗ wrong", "Resolved config", "3 of 3"):  # fmt: skip
        assert words.replace(" ", "") in page.text.replace(" ", ""), words
    assert page.tags.count("svg") == len(page.charts)


def test_page_is_self_contained_and_escaped(run_dir):
    source = render_report(run_dir).read_text()
    page = Page(source)
    assert "http://" not in source
    assert "https://" not in source
    assert [value for name, value in page.attributes if name in ("src", "href")] == ["data:,"]
    assert any("default-src 'none'" in value for name, value in page.attributes if name == "content")
    assert "<script>alert(1)</script>" not in source
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in source
    assert page.tags.count("script") == 2


def test_hostile_text_stays_text(run_dir, sample, write_lines):
    hostile = "</td></script><img src=x onerror=alert(1)>\x00\x1b[31m\u202e\ud800"
    write_lines(run_dir / "samples.jsonl", [sample(0, hostile, hostile, False), sample(3, hostile, hostile, True)])
    names = ("train/reward", f"train/{hostile}", f"train/reward/{hostile}", f"eval/{hostile}/accuracy")
    write_lines(run_dir / "metrics.jsonl", [{"step": 1, **{name: 0.1 * i for i, name in enumerate(names)}}])
    (run_dir / "config.yaml").write_text("algorithm: {name: '</title><b>'}\nkey: '<i>'\n")
    page = parsed(render_report(run_dir))
    assert "img" not in page.tags
    assert page.tags.count("i") == len(page.charts)
    assert "\x1b" not in page.source
    assert "\x00" not in page.source
    assert "\u202e" not in page.source


@pytest.mark.parametrize("lines", [
    [],
    [{"step": 0, "eval/accuracy": 0.5}],
    [{"step": 1, "train/reward": 0.5}],
    [{"step": 1, "train/reward": None}, {"step": 2, "train/reward": "NaN"}, {"step": 3, "train/reward": float("inf")}],
    [{"step": 1, "time/step_s": 0.5}],
    [{"step": 1, "time/generate_s": 0.5}],
    [{"step": s, "train/kl": 0.0} for s in range(1, 200)],
    [{"step": s, "train/kl": -1e-9 * s, "train/lr": 1e12 * s, "note": "text"} for s in range(1, 5)],
])  # fmt: skip
def test_any_metric_may_be_missing(run_dir, lines, write_lines):
    write_lines(run_dir / "metrics.jsonl", lines)
    (run_dir / "samples.jsonl").unlink()
    (run_dir / "config.yaml").unlink()
    page = parsed(render_report(run_dir))
    assert not re.search(r"(?:nan|inf)\b", "".join(v or "" for n, v in page.attributes if n in ("d", "style", "y")))


def test_values_that_are_not_finite_break_the_line_and_are_said(run_dir, write_lines):
    values = [0.1, "NaN", 0.3, None, 0.5]
    write_lines(run_dir / "metrics.jsonl", [{"step": i + 1, "train/kl": v} for i, v in enumerate(values)])
    page = parsed(render_report(run_dir))
    line = next(v for n, v in page.attributes if n == "d" and v.count("M") == 3)
    assert "L" not in line
    assert "not finite at step 2, 4" in page.text


def test_one_spike_does_not_flatten_a_curve(run_dir, write_lines):
    norms = [5000.0 if step == 50 else 1.0 + step % 3 for step in range(1, 101)]
    write_lines(run_dir / "metrics.jsonl", [{"step": i + 1, "train/grad_norm": v} for i, v in enumerate(norms)])
    page = parsed(render_report(run_dir))
    assert "1 point beyond the axis, the farthest 5,000" in page.text


def test_long_runs_keep_the_page_small(run_dir, rows, write_lines):
    write_lines(run_dir / "metrics.jsonl", [{**row, "step": i} for i, row in enumerate(rows(20000))])
    path = render_report(run_dir)
    assert path.stat().st_size < 1_500_000
    assert parsed(path).points("training")[-1] == (20000, "0.900")


def test_tracker_writes_at_the_end_whatever_the_status(run_dir, make_info, make_result, rows, sample):
    (run_dir / "metrics.jsonl").unlink()
    (run_dir / "samples.jsonl").unlink()
    (run_dir / "config.yaml").unlink()
    tracker = ReportTracker(ReportConfig(name="report"))
    tracker.started(make_info(run_dir))
    assert not (run_dir / "report.html").exists()
    for row in rows(2):
        tracker.metrics(row["step"], row)
    tracker.samples(0, [sample(0, "3 + 4 =", "9", False)])
    tracker.ended(make_result(run_dir, status="failed", steps_done=2, error="loss is <NaN>"))
    page = parsed(run_dir / "report.html")
    for words in ("failed", "loss is <NaN>", "2 of 3", "32 prompts x 8 samples = 256 sequences", "hardware: cpu"):
        assert words in page.text
    assert len(page.points("training")) == 2
    assert "Response, step 0" in page.text


def test_resumed_run_has_its_earlier_points_once(run_dir, make_info, make_result, rows, sample, write_lines):
    write_lines(run_dir / "metrics.jsonl", [*rows(3), {"step": 4, "train/reward": 9.0}])
    tracker = ReportTracker(ReportConfig(name="report"))
    tracker.started(make_info(run_dir, first_step=3))
    tracker.metrics(3, {"train/reward": 0.25})
    tracker.samples(3, [sample(3, "3 + 4 =", "8", False)])
    tracker.ended(make_result(run_dir))
    page = parsed(run_dir / "report.html")
    assert page.points("training") == [(1, "0.367"), (2, "0.633"), (3, "0.250")]
    assert "After, step 3" in page.text
    assert "right before: 0, after: 0" in page.text


def test_a_step_that_goes_back_in_the_file_replaces_what_followed(run_dir, write_lines):
    lines = [{"step": s, "train/reward": float(s)} for s in (1, 2, 3, 4)] + [{"step": 3, "train/reward": 7.0}]
    write_lines(run_dir / "metrics.jsonl", lines)
    assert parsed(render_report(run_dir)).points("training") == [(1, "1.00"), (2, "2.00"), (3, "7.00")]


def test_wall_time_adds_up_over_sessions(run_dir, make_info, make_result):
    (run_dir / "report.json").write_text(json.dumps({"status": "interrupted", "wall_s": 100.0, "unknown": 1}))
    tracker = ReportTracker(ReportConfig(name="report"))
    tracker.started(make_info(run_dir, first_step=3))
    tracker.ended(make_result(run_dir))
    assert json.loads((run_dir / "report.json").read_text())["wall_s"] == pytest.approx(100.0, abs=5.0)
    tracker = ReportTracker(ReportConfig(name="report"))
    tracker.started(make_info(run_dir))
    assert json.loads((run_dir / "report.json").read_text())["wall_s"] == 0.0


def test_a_torn_line_is_counted_and_skipped(run_dir):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/rew')
    page = parsed(render_report(run_dir))
    assert len(page.points("training")) == 3
    assert "1 line of metrics.jsonl" in page.text


def test_page_appears_whole_or_not_at_all(run_dir, monkeypatch):
    path = render_report(run_dir)
    before = path.read_bytes()
    seen = []

    def replace(source, target):
        seen.append((os.fspath(source), os.fspath(target)))
        assert os.path.dirname(source) == os.path.dirname(target)
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="disk full"):
        render_report(run_dir)
    assert len(seen) == 1
    assert path.read_bytes() == before
    assert not list(run_dir.glob("*.tmp")) + list(run_dir.glob(".*.tmp"))


def test_number_of_samples_is_set_and_said(run_dir, sample, write_lines):
    lines = [sample(step, f"{i} + 1 =", "x", step == 3) for step in (0, 3) for i in range(9)]
    write_lines(run_dir / "samples.jsonl", lines)
    page = parsed(render_report(run_dir, samples=4))
    assert "4 of 9 prompts" in page.text
    assert "right before: 0, after: 4" in page.text
    assert "Completions" not in parsed(render_report(run_dir, samples=0)).text


def test_a_folder_without_metrics_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        render_report(tmp_path)
