"""The contract of a training engine, and of the weights that leave it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from drivetrain.config import ModelConfig, PluginConfig
    from drivetrain.contracts.algorithm import LossTerm
    from drivetrain.contracts.hardware import Hardware
    from drivetrain.contracts.mesh import RankLayout
    from drivetrain.metrics import Metric
    from drivetrain.numerics import Counts
    from drivetrain.protocol import DataProto
    from drivetrain.weights import WeightStream


@dataclass(frozen=True, kw_only=True)
class BackendContext:
    """What a backend is told about the run; with ``world_size`` over 1, ``torch.distributed`` is initialised."""

    role: str  # actor, ref, critic or reward
    model: ModelConfig
    optimizer: PluginConfig | None  # resolve("optimizers", optimizer.name) builds it; None for a role that never learns
    max_grad_norm: float | None  # gradients are scaled down to this 2-norm; None leaves them
    hardware: Hardware  # of this process
    rank: int  # among the processes of the role's worker group
    world_size: int
    seed: int  # of the run; a backend derives its random numbers from it


class TrainingBackend(ABC):
    """A model and its optimizer on the devices of one role.

    The backend owns micro-batching and packing. It must make the gradient of an update the sum of the gradients of
    the loss shares over micro-batches and ranks, whatever averaging its engine does by itself.

    Capabilities that its spec may provide: ``backend.train``, ``backend.log_probs``, ``backend.values``,
    ``backend.scores``, ``backend.live_module``, ``backend.weights``, ``backend.weight_shards``, ``backend.export``,
    ``backend.snapshot``, ``backend.param_offload``, ``backend.grad_offload``, ``backend.optimizer_offload``.
    ``backend.reference`` and ``backend.adapter`` are provided by settings: its config's ``provided_capabilities()`` has
    them where an adapter alone is trained.

    Attributes:
        offloads: parts that by its settings are on the device only while a call needs them; workers see to it.
    """

    offloads: frozenset[str] = frozenset()

    def __init__(self, config: PluginConfig, context: BackendContext) -> None:
        self.config = config
        self.context = context

    @abstractmethod
    def initialize(self) -> None:
        """Load the model (and make the optimizer) on the device."""

    @property
    @abstractmethod
    def layout(self) -> RankLayout:
        """Where this rank stands in the mesh ``train``."""

    @abstractmethod
    def forward(self, batch: DataProto, outputs: Collection[str], *, temperature: float) -> dict[str, Tensor]:
        """Evaluate the model without gradient, its logits divided by the temperature.

        Args:
            batch: rows with ``input_ids`` and ``attention_mask`` ``(rows, prompt + response)`` and ``responses``.
            outputs: some of ``log_probs``, ``entropy``, ``values``; or ``scores``, for the role ``reward``, whose
                batch has ``input_ids`` and ``attention_mask`` ``(rows, tokens)``, right padded with anything, and
                perhaps ``token_type_ids``.

        Returns:
            for each output float32 ``(rows, response)``, zero beyond the response. ``log_probs[:, t]`` is the
            log-probability of ``responses[:, t]``; ``values[:, t]`` is the value before that token.
            ``scores`` is float32 ``(rows, labels)``, the logits of the classifier.
        """

    def reference_forward(self, batch: DataProto, outputs: Collection[str], *, temperature: float) -> dict[str, Tensor]:
        """As :meth:`forward`, of the model that training started from (capability ``reference``)."""
        raise TypeError(f"backend {self.config.name!r} does not offer backend.reference")

    @abstractmethod
    def update(
        self, batch: DataProto, terms: Sequence[LossTerm], counts: Counts, *, temperature: float, lr_factor: float
    ) -> dict[str, Metric]:
        """Take one optimizer step on this rank's rows of a mini-batch.

        Args:
            counts: of the whole mini-batch over all ranks.
            lr_factor: factor of the configured learning rate at this step.

        Returns:
            metrics of the terms, and ``loss``, ``grad_norm``, ``lr``.

        Raises:
            drivetrain.NonFiniteError: the loss or a gradient is not finite; no weight was changed.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write model, optimizer and random state so that :meth:`load` continues exactly; ``folder`` exists.

        Raises:
            drivetrain.NonFiniteError: a weight is NaN or infinite; such a checkpoint would be of no use.
        """

    def snapshot(self) -> Callable[[Path], None]:
        """Copy what :meth:`save` writes to host memory, and return what writes it (capability ``snapshot``).

        What is returned is called once, from another thread, with an existing folder, while this one goes on to train;
        no later snapshot is taken before it is through.

        Raises:
            drivetrain.NonFiniteError: as :meth:`save`.
        """
        raise TypeError(f"backend {self.config.name!r} does not offer backend.snapshot")

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Read back what :meth:`save` wrote."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder (safetensors, config, generation config, tokenizer)."""

    @abstractmethod
    def weights(self, *, bucket_bytes: int, sharded: bool = False) -> AbstractContextManager[WeightStream]:
        """Lend the weights under their Hugging Face names, in buckets of at most ``bucket_bytes``.

        A collective call: every rank enters, iterates the same sequence of buckets and leaves.

        Args:
            sharded: lend each rank's own shards, with their placement, for engines that reshard by themselves
                (capability ``backend.weight_shards``). What a rank has no plain shard of is whole all the same.
        """

    def adapter(self, *, bucket_bytes: int) -> AbstractContextManager[WeightStream]:
        """Lend the low-rank adapter alone, as :meth:`weights` does, in buckets of kind ``adapter`` (capability
        ``adapter``).

        Names are those of peft's files: ``base_model.model.NAME.lora_A.weight`` (rank, inputs) and ``lora_B`` (outputs,
        rank), B times the adapter's scale, so that the layer's weight with the adapter is ``W + B A``.
        """
        raise TypeError(f"backend {self.config.name!r} does not offer backend.adapter")

    def live_module(self) -> nn.Module:
        """The module itself, callable as transformers' causal language models are (capability ``live_module``)."""
        raise TypeError(f"backend {self.config.name!r} does not offer backend.live_module")

    def offload(self, parts: Collection[str]) -> None:
        """Move ``parameters``, ``gradients`` or ``optimizer`` to host memory; a part that is there stays there."""
        raise TypeError(f"backend {self.config.name!r} cannot offload {sorted(parts)}")

    def onload(self, parts: Collection[str]) -> None:
        """Bring the parts back; one that is on the device stays there."""
        raise TypeError(f"backend {self.config.name!r} cannot offload {sorted(parts)}")

    def memory(self) -> dict[str, int]:
        """Bytes held by part, for metrics; by default nothing is said."""
        return {}

    def close(self) -> None:
        """Let go of devices and files."""
