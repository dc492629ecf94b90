"""Profiles of chosen steps: what a worker's process does in them, its calls and phases by their names.

Nothing of this is in the way of a run without a profile: a worker's methods are put into named ranges when a profile
starts, and are the class's own again when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain.workers.registration import registered_methods

if TYPE_CHECKING:
    from drivetrain.config import ProfilerConfig
    from drivetrain.workers.worker import Worker

OWN = ("prepare_profile", "start_profile", "stop_profile")
TABLE_ROWS = 30


class Profiler:
    """The section ``profiler``, at work in one worker.

    A process has one profile: of several workers in it the first that starts records what all of them do.

    Raises:
        UserError: the hardware has no such tool.
    """

    _recording: ClassVar[Profiler | None] = None  # of this process

    def __init__(self, worker: Worker, section: ProfilerConfig) -> None:
        self._worker, self._section = worker, section
        self._folder = worker.config.trainer.run_dir / section.folder
        self._ranged: list[str] = []
        self._tool(self._folder)  # one that the hardware has not is refused here

    def start(self, name: str) -> None:
        """Begin, if this rank is chosen."""
        worker, section = self._worker, self._section
        if section.ranks != "all" and worker.rank not in section.ranks:
            return
        self._put_into_ranges()
        if Profiler._recording is None:
            self._aside = self._folder / f".{name}-rank-{worker.rank}"  # until its files are whole
            self._aside.mkdir(parents=True, exist_ok=True)
            self._running = self._tool(self._aside / f"{name}-rank-{worker.rank}")
            self._running.__enter__()
            Profiler._recording = self

    def stop(self) -> None:
        """End what :meth:`start` began, and put its files in place."""
        for method in self._ranged:
            delattr(self._worker, method)
        self._ranged = []
        if Profiler._recording is self:
            Profiler._recording = None
            self._running.__exit__(None, None, None)
            for file in self._aside.iterdir():
                file.replace(self._folder / file.name)
            self._aside.rmdir()

    def _tool(self, stem: Path) -> AbstractContextManager[Any]:
        """What records, as a context that writes files of that name at its end."""
        hardware, tool = self._worker.hardware, self._section.tool
        if tool == "nsys":
            return hardware.profiler()
        if tool == "memory":
            return hardware.memory_history(Path(f"{stem}.pickle"))
        return _trace(stem, hardware.device_type)

    def _put_into_ranges(self) -> None:
        import torch

        worker = self._worker
        named: Callable[[str], Any] = worker.hardware.range
        if self._section.tool == "torch":
            named = torch.profiler.record_function
        role = "_".join(worker.roles)
        own = {name: _in_range(partial(named, f"{role}.{name}"), getattr(worker, name))
               for name in registered_methods(type(worker)) if name not in OWN}  # fmt: skip
        if hasattr(worker, "phase"):
            own["phase"] = _phase_in_range(named, worker.phase)
        for name, method in own.items():
            setattr(worker, name, method)
        self._ranged = list(own)


def _in_range(named: Callable[[], Any], method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with named():
            return method(*args, **kwargs)

    return call


def _phase_in_range(named: Callable[[str], Any], phase: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def ranged(name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        with named(name), phase(name, *args, **kwargs):
            yield

    return ranged


@contextmanager
def _trace(stem: Path, device_type: str) -> Iterator[None]:
    """torch.profiler: a trace for Perfetto, and a table of the ranges and operators that took most time."""
    import torch
    from torch._C._profiler import _ExperimentalConfig

    threads = _ExperimentalConfig(profile_all_threads=True)  # rewards and writers have threads of their own
    with torch.profiler.profile(experimental_config=threads, acc_events=True) as profile:
        yield
    profile.export_chrome_trace(f"{stem}.json.gz")
    kind = "cpu" if device_type == "cpu" else "device"
    table = profile.key_averages().table(sort_by=f"{kind}_time_total", row_limit=TABLE_ROWS)
    Path(f"{stem}.txt").write_text(table, encoding="utf-8")
