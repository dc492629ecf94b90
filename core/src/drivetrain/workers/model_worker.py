"""What workers that hold models have in common."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.background import in_background
from drivetrain.contracts.backend import BackendContext, TrainingBackend
from drivetrain.contracts.mesh import RankLayout
from drivetrain.errors import NonFiniteError
from drivetrain.numerics import Counts, group_index
from drivetrain.protocol import DataProto
from drivetrain.seam.registry import resolve
from drivetrain.workers.registration import register
from drivetrain.workers.worker import Worker

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch import Tensor

    from drivetrain.config import ModelConfig, OptimizerConfig, PluginConfig
    from drivetrain.contracts.algorithm import Algorithm, LossTerm
    from drivetrain.metrics import Metric


LEARNING = ("parameters", "optimizer")  # the parts of a model that an update needs


class ModelWorker(Worker):
    """Holds a training backend for each of its roles that is a model; one of these may learn.

    Attributes:
        learns: the role that checkpoints and exports are of.
    """

    learns: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.backends: dict[str, TrainingBackend] = {}
        self._writing: Future[None] | None = None

    def start_backend(
        self, role: str, section: PluginConfig, model: ModelConfig, optimizer: OptimizerConfig | None = None,
        max_grad_norm: float | None = None,
    ) -> TrainingBackend:  # fmt: skip
        """Load the model of a role."""
        context = BackendContext(
            role=role, model=model, optimizer=optimizer, max_grad_norm=max_grad_norm, hardware=self.hardware,
            rank=self.rank, world_size=self.world_size, seed=self.config.trainer.seed,
        )  # fmt: skip
        backend: TrainingBackend = resolve("backends", section.name)(section, context)
        backend.initialize()
        self.backends[role] = backend
        if backend.offloads:
            backend.offload(backend.offloads)
        return backend

    @contextmanager
    def phase(self, name: str, role: str, *parts: str, stay: Collection[str] = ()) -> Iterator[None]:
        """Have parts of a role's model on the device for a phase; those that it offloads leave, unless they stay.

        Where a model of this worker is offloaded, the device's memory is measured.
        """
        if not any(backend.offloads for backend in self.backends.values()):
            yield
            return
        before = self.hardware.memory().allocated
        self.hardware.reset_peak()
        moving = self.backends[role].offloads.intersection(parts) if parts else frozenset[str]()
        if moving:
            self.backends[role].onload(moving)
        try:
            yield
        finally:
            if leaving := moving.difference(stay):
                self.backends[role].offload(leaving)
            now = self.hardware.memory()
            for when, count in (("before", before), ("peak", now.peak), ("after", now.allocated)):
                key = f"memory/{name}_{when}_bytes"
                self.memory[key] = max(self.memory.get(key, 0.0), float(count))

    def finite(self, **columns: Tensor) -> DataProto:
        """A result of these columns, (rows, response) each, on the host.

        Raises:
            NonFiniteError: one of them is NaN or infinite somewhere.
        """
        for name, column in columns.items():
            if bad := int((~column.isfinite()).any(dim=1).sum()):
                raise NonFiniteError(
                    f"{name} of {bad} of {len(column)} rows are not finite; no weight was changed",
                    where=f"worker {'_'.join(self.roles)}, rank {self.rank}",
                    mend="lower the learning rate, or train in a dtype of larger range",
                )  # fmt: skip
        return DataProto.from_dict({name: column.cpu() for name, column in columns.items()})

    @property
    def device_name(self) -> str:
        """Kind and name of the device."""
        return f"{self.hardware.device_type} ({self.hardware.device_name()})"

    def layout(self, mesh: str) -> RankLayout:
        if mesh == "train" and self.backends:
            return next(iter(self.backends.values())).layout
        return super().layout(mesh)

    def update(
        self, batch: DataProto, terms: Sequence[LossTerm] | None, counts: Counts | None, *, temperature: float,
        lr_factor: float,
    ) -> dict[str, Metric]:  # fmt: skip
        """One optimizer step of the model that learns; terms default to the algorithm's, counts to the batch's."""
        if terms is None:
            algorithm: Algorithm = resolve("algorithms", self.config.algorithm.name)(self.config.algorithm)
            terms = [term for term in algorithm.loss_terms(self.learns) if term.weight != 0]
        counts = self.count(batch) if counts is None else counts
        backend = self.backends[self.learns]
        return backend.update(batch, terms, counts, temperature=temperature, lr_factor=lr_factor)

    def count(self, batch: DataProto) -> Counts:
        """The counts of a mini-batch of which this rank holds a part: a collective call."""
        mask, index = batch["response_mask"], self.layout("train")
        own = Counts.of(mask, group_index(batch["uid"]) if "uid" in batch else None)
        if index.dp_size == 1:
            return own
        import torch.distributed as dist

        rows = (mask != 0).any(dim=-1).tolist()
        uids = batch["uid"].tolist() if "uid" in batch else [(index.dp, row) for row in range(len(rows))]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, (index.dp, own, {uid for uid, chosen in zip(uids, rows) if chosen}))
        parts = {dp: (counts, groups) for dp, counts, groups in found}  # ranks of one index hold the same rows
        return Counts(
            tokens=sum(counts.tokens for counts, _ in parts.values()),
            sequences=sum(counts.sequences for counts, _ in parts.values()),
            groups=len(set().union(*(groups for _, groups in parts.values()))),
        )

    @register()
    def save_checkpoint(self, folder: Path, background: bool = False) -> None:
        """Write the state of the model that learns below ``folder``; or copy it, and write the copy in a thread."""
        (folder / self.learns).mkdir(parents=True, exist_ok=True)
        backend = self.backends[self.learns]
        with self.phase("save", self.learns, *LEARNING):
            if background:
                self._writing = in_background(partial(backend.snapshot(), folder / self.learns), "checkpoint")
            else:
                backend.save(folder / self.learns)

    @register()
    def checkpoint_written(self, wait: bool) -> bool:
        """Whether what :meth:`save_checkpoint` writes in a thread is there; raises what the thread raised."""
        assert self._writing is not None
        if wait or self._writing.done():
            self._writing.result()
            return True
        return False

    @register()
    def load_checkpoint(self, folder: Path) -> None:
        """Read what :meth:`save_checkpoint` wrote."""
        with self.phase("load", self.learns, *LEARNING):
            self.backends[self.learns].load(folder / self.learns)

    @register()
    def export_model(self, folder: Path) -> None:
        """Write the model that learns as a Hugging Face folder."""
        with self.phase("export", self.learns, "parameters"):
            self.backends[self.learns].export(folder)

    def close(self) -> None:
        for backend in self.backends.values():
            backend.close()
        super().close()
