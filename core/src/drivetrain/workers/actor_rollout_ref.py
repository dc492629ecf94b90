"""The worker of the policy: training, generation and the reference, in any combination, on any engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from drivetrain.contracts.backend import TrainingBackend
from drivetrain.contracts.mesh import RankLayout
from drivetrain.contracts.placement import HybridEngine
from drivetrain.contracts.rollout import RolloutContext, RolloutEngine
from drivetrain.driver.text import load_tokenizer, pad_token_id
from drivetrain.protocol import DataProto
from drivetrain.seam.registry import get_registry, resolve
from drivetrain.workers.generation import completions_to_batch, requests_of
from drivetrain.workers.model_worker import LEARNING, ModelWorker
from drivetrain.workers.registration import register

if TYPE_CHECKING:
    from drivetrain.contracts.algorithm import LossTerm
    from drivetrain.metrics import Metric
    from drivetrain.numerics import Counts


class ActorRolloutRefWorker(ModelWorker):
    """Plays ``actor``, ``rollout`` and ``ref`` through the contracts of backends and rollouts."""

    learns = "actor"

    actor: TrainingBackend | None = None
    ref: TrainingBackend | None = None
    rollout: RolloutEngine | None = None
    hybrid: HybridEngine | None = None
    _generating = False  # with the actor's current weights
    _updates = 0

    @register()
    def init_model(self) -> str:
        """Load the models; the rollout comes last, because engines measure the memory that is left.

        Returns:
            the name of the device.
        """
        run = self.config
        if "actor" in self.roles:
            self.actor = self.start_backend("actor", run.actor.backend, run.model, run.actor.optimizer,
                                            run.actor.max_grad_norm)  # fmt: skip
        if "ref" in self.roles:
            assert run.ref is not None
            if not run.actor_is_reference:
                self.ref = self.start_backend("ref", run.ref.backend, run.ref.model or run.model)
        if "rollout" in self.roles:
            assert run.rollout is not None
            context = RolloutContext(model=run.model, hardware=self.hardware, rank=self.rank,
                                     world_size=self.world_size, seed=run.trainer.seed,
                                     receives_weights=True)  # fmt: skip
            self.rollout = resolve("rollouts", run.rollout.name)(run.rollout, context)
        sides = [side for side in (self.actor, self.rollout) if side is not None]
        if run.rollout is not None and (len(sides) == 2 or (sides and run.two_groups(get_registry()))):
            self.hybrid = resolve("hybrid_engines", run.hybrid_engine.name)(run.hybrid_engine)
            self.hybrid.attach(self.actor, self.rollout)
        if self.rollout is not None:
            self.rollout.initialize()
        return self.device_name

    @register()
    def shares_weights(self) -> bool:
        """Whether the rollout runs the actor's own module."""
        return self.hybrid is not None and self.hybrid.shares

    @register()
    def open_meeting(self) -> str:
        """Where actor and rollout are two groups: get ready to be met by the rollout; rank 0 returns the address."""
        assert self.hybrid is not None
        return self.hybrid.open()

    @register()
    def connect(self, address: str) -> str:
        """Where actor and rollout are two groups: meet the other one, while it is called, too; returns how."""
        assert self.hybrid is not None
        return self.hybrid.connect(address)

    @register()
    def enter_generation(self, version: int) -> Mapping[str, float]:
        """Get ready to generate with the weights of that version; generation does so by itself if this was not called.

        Without a hybrid engine there is nothing to do.
        """
        self._generating, metrics = False, {}  # after an error there is nothing to generate with
        if self.hybrid:
            with self.phase("sync", "actor", "parameters"):
                metrics = dict(self.hybrid.enter_generation(version))
        self._generating = True
        return metrics

    @register()
    def enter_training(self) -> Mapping[str, float]:
        """Get ready to train; the other methods do so by themselves if this was not called."""
        self._generating = False
        return self.hybrid.enter_training() if self.hybrid else {}

    @register("dp_compute_proto", mesh="rollout")
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Draw completions.

        Args:
            prompts: ``input_ids`` and ``attention_mask`` (prompts, prompt), left padded; ``uid`` if seeds are to be
                independent of the order; ``meta_info`` may hold ``samples`` (completions of each prompt), ``step``,
                ``temperature``, ``pad_token_id`` (the tokenizer's, if omitted) and ``recompute_log_probs``.

        Returns:
            one row a completion, those of a prompt together, with ``prompts``, ``responses``, ``input_ids``,
            ``attention_mask``, ``response_mask``, ``rollout_log_probs`` and the non-tensor columns of the prompts;
            with an actor, also its ``old_log_probs`` and ``entropy``, unless ``recompute_log_probs`` is False.
        """
        assert self.rollout is not None and self.config.rollout is not None
        rollout, meta = self.config.rollout, prompts.meta_info
        pad = int(meta["pad_token_id"]) if "pad_token_id" in meta else self._pad_token_id
        if not self._generating:
            self.enter_generation(self._updates)
        requests = requests_of(prompts, rollout, seed=self.config.trainer.seed, part=self.layout("rollout").dp)
        with self.phase("generate", "actor"):
            completions = self.rollout.generate_batch(requests)
        batch = completions_to_batch(prompts, completions, rollout, pad_token_id=pad)
        if self.actor is not None and meta.get("recompute_log_probs", True):
            batch = batch.union(self._log_prob_of_own(batch))
        return batch

    def _log_prob_of_own(self, batch: DataProto) -> DataProto:
        """As :meth:`compute_log_prob`, of rows that no other rank has: those of one dp index take all of theirs."""
        dp = self.layout("train").dp
        if self.layout("train").dp_size == self.world_size:
            return self.compute_log_prob(batch)
        import torch.distributed as dist

        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, (dp, batch.select(("input_ids", "attention_mask", "responses"), (), ())))
        parts = {rank: part for rank, (index, part) in enumerate(found) if index == dp}
        start = sum(len(part) for rank, part in parts.items() if rank < self.rank)
        return self.compute_log_prob(DataProto.concat(list(parts.values())))[start : start + len(batch)]

    @register("dp_compute_proto")
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """The actor's ``old_log_probs`` and ``entropy``, each (rows, response)."""
        assert self.actor is not None
        self._train()
        with self.phase("log_probs", "actor", "parameters", stay=("parameters",)):
            out = self.actor.forward(batch, ("log_probs", "entropy"), temperature=self._temperature)
        return self.finite(old_log_probs=out["log_probs"], entropy=out["entropy"])

    @register("dp_compute_proto")
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """The reference's ``ref_log_probs`` (rows, response)."""
        self._train()
        if self.ref is not None:
            with self.phase("ref_log_probs", "ref", "parameters"):
                out = self.ref.forward(batch, ("log_probs",), temperature=self._temperature)
        else:
            assert self.actor is not None
            with self.phase("ref_log_probs", "actor", "parameters", stay=("parameters",)):
                out = self.actor.reference_forward(batch, ("log_probs",), temperature=self._temperature)
        return self.finite(ref_log_probs=out["log_probs"])

    @register("dp_compute_metric")
    def update_actor(
        self, batch: DataProto, terms: Sequence[LossTerm] | None = None, counts: Counts | None = None,
        lr_factor: float = 1.0,
    ) -> dict[str, Metric]:  # fmt: skip
        """One optimizer step of the actor on one mini-batch; by default on the algorithm's terms."""
        self._train()
        with self.phase("update", "actor", *LEARNING, stay=("parameters",)):
            metrics = self.update(batch, terms, counts, temperature=self._temperature, lr_factor=lr_factor)
        self._updates += 1
        return metrics

    def _train(self) -> None:
        if self._generating:
            self.enter_training()

    def layout(self, mesh: str) -> RankLayout:
        return self.rollout.layout if mesh == "rollout" and self.rollout is not None else super().layout(mesh)

    @cached_property
    def _pad_token_id(self) -> int:
        return pad_token_id(load_tokenizer(self.config.model))

    @property
    def _temperature(self) -> float:
        """What logits are divided by: as in sampling, for an algorithm that samples; 1 otherwise, or if greedy."""
        generates = get_registry().find("algorithms", self.config.algorithm.name).spec.generates
        return (self.config.rollout.temperature if self.config.rollout and generates else 1.0) or 1.0

    def close(self) -> None:
        if self.rollout is not None:
            self.rollout.close()
        super().close()
