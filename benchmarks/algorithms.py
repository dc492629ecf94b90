"""Learning curves of every algorithm, estimator and policy loss: the examples, several seeds each.

    python benchmarks/algorithms.py run curves.json --jobs 2   # trains what the file lacks of examples/algorithms
    python benchmarks/algorithms.py figure curves.json         # docs/images/algorithms.svg, one for each page, a table

``figure`` needs matplotlib. Times of runs that share a machine are of
that load; the table gives them as multiples of GRPO's, whose runs have the same company.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples" / "algorithms"
IMAGES = ROOT / "docs" / "images"
PAGES = ROOT / "docs" / "algorithms"
HELD_OUT = 512


def train(config: Path, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """One run: held-out accuracy at each evaluation, and the median seconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", config, "trackers=[{name: jsonl}]", f"trainer.seed={seed}",
                 f"trainer.run_dir={folder}/run", *overrides]  # fmt: skip
        command = [sys.executable, "-c", "from drivetrain.cli.main import main; main()", *map(str, words)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{config.stem}, seed {seed}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if "eval/accuracy" in row]
    steps = [row["time/step_s"] for row in rows if "time/step_s" in row]
    return {
        "steps": [row["step"] for row in evaluated], "accuracy": [row["eval/accuracy"] for row in evaluated],
        "step_s": statistics.median(steps),
    }  # fmt: skip


def run(out: Path, folder: Path, names: Sequence[str], seeds: int, jobs: int, overrides: Sequence[str]) -> None:
    """Train what is not in the file yet; it is written after each run."""
    curves: dict[str, dict[str, Any]] = json.loads(out.read_text()) if out.exists() else {}
    chosen = names or sorted(path.stem for path in folder.glob("*.yaml"))
    todo = [(n, s) for s in range(1, seeds + 1) for n in chosen if str(s) not in curves.get(n, {})]
    lock = Lock()

    def one(job: tuple[str, int]) -> None:
        name, seed = job
        try:
            found = train(folder / f"{name}.yaml", seed, overrides)
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
            return
        with lock:
            curves.setdefault(name, {})[str(seed)] = found
            out.write_text(json.dumps(dict(sorted(curves.items())), indent=1) + "\n")
            accuracy = found["accuracy"]
            print(
                f"{name} seed {seed}: {accuracy[0]:.3f} -> {accuracy[-1]:.3f}, {found['step_s']:.2f} s a step",
                flush=True,
            )

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, todo))


def figure(file: Path) -> None:
    """Draw all curves in one figure and each in one of its own, and print the table."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "drivetrain", "svg.fonttype": "none", "font.size": 8,
                                "axes.spines.top": False, "axes.spines.right": False})  # fmt: skip
    from matplotlib import pyplot

    curves: dict[str, dict[str, Any]] = json.loads(file.read_text())
    baseline = curves["grpo"]

    def draw(axes: Any, name: str) -> None:
        for runs, color, width in ((baseline, "0.75", 0.8), (curves[name], "#1f5fa8", 1.2)):
            for curve in runs.values():
                axes.plot(curve["steps"], curve["accuracy"], color=color, linewidth=width)
        axes.set_title(name, loc="left")
        axes.set_ylim(0, 0.8)
        axes.set_xlim(0, max(curve["steps"][-1] for curve in curves[name].values()))

    names = sorted(curves)
    columns = 5
    rows = -(-len(names) // columns)
    whole, grid = pyplot.subplots(rows, columns, figsize=(11, 1.9 * rows), sharey=True, layout="constrained")
    for axes, name in zip(grid.flat, names):
        draw(axes, name)
    for axes in grid.flat[len(names) :]:
        axes.set_visible(False)
    whole.supxlabel("step")
    whole.supylabel(f"held-out accuracy, {HELD_OUT} prompts")
    (IMAGES / "algorithms").mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None}
    whole.savefig(IMAGES / "algorithms.svg", metadata=metadata)
    for name in (name for name in names if (PAGES / f"{name}.md").exists()):
        alone, axes = pyplot.subplots(figsize=(4.2, 2.4), layout="constrained")
        draw(axes, name)
        axes.set_xlabel("step")
        axes.set_ylabel("held-out accuracy")
        alone.savefig(IMAGES / "algorithms" / f"{name}.svg", metadata=metadata)
        pyplot.close(alone)
    cost = statistics.median(curve["step_s"] for curve in baseline.values())
    print("| name | steps | start | end, of each seed | step, over GRPO's |\n| --- | --- | --- | --- | --- |")
    for name in names:
        own = list(curves[name].values())
        ends = ", ".join(f"{curve['accuracy'][-1]:.3f}" for curve in own)
        step = statistics.median(curve["step_s"] for curve in own) / cost
        print(f"| `{name}` | {own[0]['steps'][-1]} | {own[0]['accuracy'][0]:.3f} | {ends} | {step:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "figure"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--names", nargs="*", default=[])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--examples", type=Path, default=EXAMPLES, help="folder of the configs")
    parser.add_argument("--overrides", nargs="*", default=[], metavar="section.key=value")
    given = parser.parse_args()
    if given.what == "figure":
        figure(given.file)
    else:
        run(given.file, given.examples, given.names, given.seeds, given.jobs, given.overrides)


if __name__ == "__main__":
    main()
