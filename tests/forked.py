"""The command line in processes of their own that do not import torch each: they are forked from one that has."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", "drivetrain.cli.main", "drivetrain_backend_fsdp.backend",
                              "drivetrain_rollout_hf.engine", "transformers.models.llama.modeling_llama"])  # fmt: skip


def start(words: list[str], output: Path) -> ForkServerProcess:
    """Start ``drivetrain WORDS``, whose output is appended to a file."""
    process = FORKS.Process(target=_program, args=(words, output))
    process.start()
    return process


def _program(words: list[str], output: Path) -> None:
    with output.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from drivetrain.cli.main import main

    sys.argv = ["drivetrain", *words]
    main()
