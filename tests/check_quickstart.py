"""Check the run folder that `make quickstart` made: python tests/check_quickstart.py runs/quickstart"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(run_dir: Path) -> None:
    """Exit with a message unless held-out accuracy rose from about 35 % to at least 70 %."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    accuracies = {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}
    first, last = accuracies[0], accuracies[max(accuracies)]
    page = (run_dir / "report.html").read_text()
    print(f"held-out accuracy {first:.3f} -> {last:.3f} in {max(accuracies)} steps")
    problems = [
        text
        for wrong, text in (
            (not 0.25 <= first <= 0.45, "the start is not about 35 %"),
            (last < 0.70, "the end is below 70 %"),
            (max(accuracies) != rows[-1]["step"], "the last step was not evaluated"),
            ("<svg" not in page, "report.html has no curves"),
            (not list(run_dir.glob("checkpoints/step-*/driver.json")), "there is no checkpoint"),
        )
        if wrong
    ]
    if problems:
        sys.exit("; ".join(problems))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
