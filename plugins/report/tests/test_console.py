from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from drivetrain_report.closing import easiest_prompt, shell_quote
from drivetrain_report.config import ConsoleConfig
from drivetrain_report.console import ConsoleTracker
from drivetrain_report.live import LiveView, apportion, sparkline
from drivetrain_report.progress import Progress


def play(tracker, info, result, logged, prompt="3 + 4 ="):
    tracker.started(info)
    for row in logged:
        step = row["step"]
        tracker.phase(max(step, 1), "generate")
        tracker.metrics(step, {name: value for name, value in row.items() if name != "step"})
        if step == 0:
            tracker.samples(0, [{"prompt": prompt}])
    tracker.ended(result)


def test_lines_exactly(capsys, tmp_path, monkeypatch, make_info, make_result, rows):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    (folder / "report.html").write_text("")
    play(ConsoleTracker(ConsoleConfig(name="console")), make_info(folder), make_result(folder), rows(3))
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.splitlines() == [
        "plan: 3 steps of 32 prompts x 8 samples = 256 sequences; mini-batches 1"
        " | hardware: cpu | ref derives from [bold]actor",
        "step 0/3  accuracy 0.125",
        "step 1/3  reward 0.367  response 4.00 tokens  kl 0.0010  entropy 1.50  1,234 tok/s  0.52 s",
        "step 2/3  reward 0.633  response 4.00 tokens  kl 0.0020  entropy 1.50  1,234 tok/s  0.52 s",
        "step 3/3  reward 0.900  accuracy 0.750  response 4.00 tokens  kl 0.0030  entropy 1.50  1,234 tok/s  0.52 s",
        "finished    3 of 3 steps in 0 s",
        "accuracy    0.125 -> 0.750",
        "run folder  runs/first",
        "report      runs/first/report.html",
        'try it      drivetrain generate runs/first --prompt "3 + 4 ="',
    ]


def test_lines_of_a_failed_run_without_metrics_or_model(capsys, make_info, make_result):
    play(ConsoleTracker(ConsoleConfig(name="console")), make_info(), make_result(status="failed", steps_done=0), [])
    out = capsys.readouterr().out
    assert "failed      0 of 3 steps" in out
    assert "accuracy" not in out
    assert "try it" not in out
    assert "report " not in out


def test_report_is_named_when_it_is_about_to_be_written(capsys, make_info, make_result):
    info = make_info(config={"trackers": [{"name": "console"}, {"name": "report"}]})
    play(ConsoleTracker(ConsoleConfig(name="console")), info, make_result(), [])
    assert "report.html" in capsys.readouterr().out


def test_a_value_that_is_not_finite_is_said(capsys, make_info):
    tracker = ConsoleTracker(ConsoleConfig(name="console"))
    tracker.started(make_info())
    tracker.metrics(1, {"train/reward": float("nan"), "train/kl": float("inf")})
    assert capsys.readouterr().out.splitlines()[-1] == "step 1/3  reward nan  kl inf"


def test_resumed_run_compares_with_its_first_evaluation(capsys, run_dir, make_info, make_result, write_lines):
    write_lines(run_dir / "metrics.jsonl", [{"step": 0, "eval/accuracy": 0.1}, {"step": 2, "eval/accuracy": 0.9}])
    tracker = ConsoleTracker(ConsoleConfig(name="console"))
    tracker.started(make_info(run_dir, first_step=2))
    tracker.metrics(3, {"eval/accuracy": 0.5})
    tracker.ended(make_result(run_dir))
    assert "accuracy    0.100 -> 0.500" in capsys.readouterr().out


@pytest.mark.parametrize("width", [20, 40, 76, 120])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_live_view_fits(width, ascii_only, make_info, rows):
    now = [0.0]
    progress = Progress(make_info(), clock=lambda: now[0])
    file = io.TextIOWrapper(io.BytesIO(), "ascii" if ascii_only else "utf-8")
    console = Console(force_terminal=True, width=width, file=file, record=True, legacy_windows=False)
    console.print(LiveView(progress))
    for row in rows(60):
        now[0] += 0.5
        progress.enter(max(row["step"], 1), "generate")
        progress.log(row["step"], row)
        console.print(LiveView(progress))
    console.export_text()
    console.print(LiveView(progress))
    lines = console.export_text().splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "step 60/3" in text
    assert "generate" in text
    assert "reward" in text
    if width >= 40:
        assert "was 0.125 at step 0" in text
        assert "1,234" in text


@pytest.mark.parametrize("width", [40, 120])
def test_live_run_from_start_to_end(width, make_info, make_result, rows):
    console = Console(force_terminal=True, width=width, file=io.StringIO(), record=True)
    play(ConsoleTracker(ConsoleConfig(name="console"), console=console), make_info(), make_result(), rows(3))
    text = console.export_text()
    assert text.count("32 prompts x 8 samples") == 1
    assert "[bold]actor" in text
    assert "0.125 -> 0.750" in text
    assert "drivetrain generate" in text


def test_live_view_draws_while_steps_are_added(make_info):
    progress = Progress(make_info())
    console = Console(force_terminal=True, width=100, file=io.StringIO())
    failures = []

    def draw():
        try:
            for _ in range(60):
                console.print(LiveView(progress))
        except RuntimeError as e:
            failures.append(e)

    thread = threading.Thread(target=draw)
    thread.start()
    for step in range(1, 5000):
        progress.log(step, {"train/reward": 0.5, "time/generate_s": 0.1})
    thread.join()
    assert not failures


def test_ranks_that_are_done_are_shown_until_all_are(make_info):
    tracker = ConsoleTracker(ConsoleConfig(name="console"))
    tracker.started(make_info())
    tracker.phase(1, "generate")

    def shown():
        console = Console(force_terminal=True, width=100, file=io.StringIO(), record=True)
        console.print(LiveView(tracker._progress))
        return console.export_text()

    tracker.ranks(1, "generate", 3, 8)
    assert "3 of 8 ranks done" in shown()
    tracker.ranks(1, "sync", 4, 8)  # of a phase that was not announced
    assert "3 of 8 ranks done" in shown()
    tracker.ranks(1, "generate", 8, 8)
    assert "ranks" not in shown()
    tracker.ranks(1, "generate", 1, 8)
    tracker.phase(1, "reward")
    assert "ranks" not in shown()


def test_time_left_follows_the_pace(make_info):
    now = [0.0]
    progress = Progress(make_info(config={"trainer": {"steps": 100}}), clock=lambda: now[0])
    assert progress.remaining_s is None
    for step in range(1, 11):
        now[0] += 2.0
        progress.log(step, {})
    assert progress.remaining_s == pytest.approx(180.0)
    now[0] += 5.0
    assert progress.remaining_s == pytest.approx(175.0)


def test_sparkline_and_shares():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert len(sparkline(list(range(1000)), 30)) == 30
    assert sparkline([1.0, 1.0], 8) == "▅▅"
    assert apportion([2, 1, 1], 10) in ([5, 3, 2], [5, 2, 3])
    assert sum(apportion([0.1, 0.2, 5], 37)) == 37


@pytest.mark.parametrize(("text", "quoted"), [
    ("3 + 4 =", '"3 + 4 ="'),
    ("cost in $", "'cost in $'"),
    ("it's $5", "'it'\"'\"'s $5'"),
    ("a\nb\x1b['", r"$'a\nb\U0000001b[\''"),
])  # fmt: skip
def test_prompts_are_quoted_for_a_shell(text, quoted):
    assert shell_quote(text) == quoted


def test_the_first_prompt_that_reads_well_is_shown():
    assert easiest_prompt(["x" * 500, "a\nb", "3 + 4 ="]) == "3 + 4 ="
    assert easiest_prompt(["x" * 500, "y" * 300]) == "y" * 300
    assert easiest_prompt([]) is None
