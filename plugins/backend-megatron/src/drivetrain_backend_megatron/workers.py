"""Workers whose ranks stand in megatron-core's mesh, under the names that Megatron's users know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from drivetrain import DataProto, ModelWorker, RankLayout, UserError, register
from drivetrain.metrics import Metric, merge_metrics
from drivetrain_backend_megatron import cpu, offload, parallel
from drivetrain_backend_megatron.config import MegatronConfig

if TYPE_CHECKING:
    from drivetrain import LossTerm


@dataclass(frozen=True, kw_only=True)
class MegatronGlobalInfo:
    """Ranks along each kind of parallelism; expert parallelism lies across the others."""

    tp_size: int
    pp_size: int
    dp_size: int
    cp_size: int
    ep_size: int

    @classmethod
    def of(cls, layout: RankLayout) -> MegatronGlobalInfo:
        """The sizes of a mesh, from the place of any of its ranks."""
        return cls(tp_size=layout.tp_size, pp_size=layout.pp_size, dp_size=layout.dp_size, cp_size=layout.cp_size,
                   ep_size=layout.ep_size)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MegatronRankInfo:
    """Where one rank stands."""

    tp_rank: int
    pp_rank: int
    dp_rank: int
    cp_rank: int
    ep_rank: int

    @classmethod
    def of(cls, layout: RankLayout) -> MegatronRankInfo:
        """A rank's place in the mesh."""
        return cls(tp_rank=layout.tp, pp_rank=layout.pp, dp_rank=layout.dp, cp_rank=layout.cp, ep_rank=layout.ep)


class MegatronWorker(ModelWorker):
    """A worker that is written by hand, or a generic one with these methods: ``class Actor(MegatronWorker,
    ActorRolloutRefWorker)``.

    Calls of methods that are registered for the mesh ``train`` are dispatched by each rank's place among
    megatron-core's process groups. There are groups as soon as a model is loaded or :meth:`init_megatron` is called;
    until then every rank is one of data parallelism.
    """

    _has_groups = False

    @register()
    def init_megatron(self, **settings: Any) -> None:
        """Make the process groups, before the first model does; a second call does nothing.

        Args:
            settings: those of the backend ``megatron``, such as ``tensor_model_parallel_size``.

        Raises:
            drivetrain.RunError: the processes do not divide, or there are groups of other sizes.
        """
        if self._has_groups:
            return
        on_cpu = self.hardware.device().type == "cpu"
        with cpu.stand_in() if on_cpu else nullcontext():
            parallel.initialize(
                MegatronConfig(**settings), communication_backend=self.hardware.communication_backend,
                seed=self.config.trainer.seed,
            )  # fmt: skip
        self._has_groups = True

    @register()
    def get_megatron_global_info(self) -> MegatronGlobalInfo:
        """The sizes by which calls are dispatched."""
        return MegatronGlobalInfo.of(self.layout("train"))

    @register()
    def get_megatron_rank_info(self) -> MegatronRankInfo:
        """This rank's place, by which calls are dispatched."""
        return MegatronRankInfo.of(self.layout("train"))

    def layout(self, mesh: str) -> RankLayout:
        return parallel.layout() if mesh == "train" and self._has_groups else super().layout(mesh)

    def close(self) -> None:
        if self._has_groups:
            self._has_groups = False
            parallel.release()
        super().close()


class MegatronPPOActor:
    """The policy of a worker, or its reference: the model of a role of the run, behind two calls.

    The computations are those of the backend. The worker counts the tokens of a mini-batch over all ranks, has what is
    offloaded on the device while a call needs it, and saves and exports the policy.

    Args:
        worker: in whose process the model is loaded.
        role: ``actor``, or ``ref``, which has no optimizer.
        terms: the objective; omitted, that of the run's algorithm, such as PPO's clipped loss and its entropy.
        temperature: what logits are divided by; omitted, that of sampling, or 1 where it is greedy.
    """

    def __init__(
        self, worker: ModelWorker, role: Literal["actor", "ref"] = "actor", *,
        terms: Sequence[LossTerm] | None = None, temperature: float | None = None,
    ) -> None:  # fmt: skip
        run = worker.config
        self.worker, self.role, self.terms = worker, role, terms
        if temperature is None:
            temperature = run.rollout.temperature if run.rollout is not None else 1.0
        self.temperature = temperature or 1.0
        if role == "actor":
            actor = run.actor
            self.backend = worker.start_backend(role, actor.backend, run.model, actor.optimizer, actor.max_grad_norm)
            worker.learns = role
        elif run.ref is None:
            raise UserError("the run has no reference", where="ref", mend="add a section ref")
        else:
            self.backend = worker.start_backend(role, run.ref.backend, run.ref.model or run.model)

    def compute_log_prob(self, data: DataProto) -> DataProto:
        """``old_log_probs`` and ``entropy``, or a reference's ``ref_log_probs``, each (rows, response)."""
        outputs = ("log_probs", "entropy") if self.role == "actor" else ("log_probs",)
        with self.worker.phase("log_probs", self.role, "parameters"):
            found = self.backend.forward(data, outputs, temperature=self.temperature)
        found["old_log_probs" if self.role == "actor" else "ref_log_probs"] = found.pop("log_probs")
        return self.worker.finite(**found)

    def update_policy(
        self, mini_batches: DataProto | Iterable[DataProto], *, lr_factor: float = 1.0
    ) -> dict[str, Metric]:
        """One optimizer step on each mini-batch, of which this rank has its rows: a collective call, in which all ranks
        give equally many.

        Register a method that calls this with ``dp_compute_metric``, which pads no rows and merges metrics.

        Raises:
            drivetrain.UserError: there are rows that only pad the batch, or this is a reference.
        """
        if self.role != "actor":
            raise UserError("a reference does not learn", where="MegatronPPOActor.update_policy")
        found = []
        for batch in [mini_batches] if isinstance(mini_batches, DataProto) else mini_batches:
            if "is_padding" in batch:
                raise UserError("some rows only pad the batch", where="MegatronPPOActor.update_policy",
                                mend="register the method that calls it with dp_compute_metric")  # fmt: skip
            with self.worker.phase("update", self.role, *offload.PARTS):
                found.append(self.worker.update(batch, self.terms, None, temperature=self.temperature,
                                                lr_factor=lr_factor))  # fmt: skip
        return merge_metrics(found)
