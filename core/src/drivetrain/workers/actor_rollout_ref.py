"""The worker of the policy: training, generation and the reference, in any combination, on any engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from drivetrain.contracts.backend import TrainingBackend
from drivetrain.contracts.placement import HybridEngine
from drivetrain.contracts.rollout import RolloutContext, RolloutEngine
from drivetrain.protocol import DataProto
from drivetrain.seam.registry import get_registry, resolve
from drivetrain.workers.generation import completions_to_batch, requests_of
from drivetrain.workers.model_worker import ModelWorker
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
            self.ref = self.start_backend("ref", run.ref.backend, run.ref.model or run.model)
        if "rollout" in self.roles:
            assert run.rollout is not None
            context = RolloutContext(model=run.model, hardware=self.hardware, rank=self.rank,
                                     world_size=self.world_size, seed=run.trainer.seed)  # fmt: skip
            self.rollout = resolve("rollouts", run.rollout.name)(run.rollout, context)
            if self.actor is not None:
                self.hybrid = resolve("hybrid_engines", run.hybrid_engine.name)(run.hybrid_engine)
                self.hybrid.attach(self.actor, self.rollout)
            self.rollout.initialize()
        return self.device_name

    @register()
    def enter_generation(self, version: int) -> Mapping[str, float]:
        """Get ready to generate with the weights of that version."""
        return self.hybrid.enter_generation(version) if self.hybrid else {}

    @register()
    def enter_training(self) -> Mapping[str, float]:
        """Get ready to train."""
        return self.hybrid.enter_training() if self.hybrid else {}

    @register("dp_compute_proto", mesh="rollout")
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Draw completions.

        Args:
            prompts: ``input_ids`` and ``attention_mask`` (prompts, prompt), left padded; ``uid`` if seeds are to be
                independent of the order; ``meta_info`` may hold ``samples`` (completions of each prompt), ``step``
                and ``temperature``.

        Returns:
            one row a completion, those of a prompt together, with ``prompts``, ``responses``, ``input_ids``,
            ``attention_mask``, ``response_mask``, ``rollout_log_probs`` and the non-tensor columns of the prompts.
        """
        assert self.rollout is not None and self.config.rollout is not None
        rollout, pad = self.config.rollout, int(prompts.meta_info["pad_token_id"])
        completions = self.rollout.generate_batch(requests_of(prompts, rollout, seed=self.config.trainer.seed))
        return completions_to_batch(prompts, completions, rollout, pad_token_id=pad)

    @register("dp_compute_proto")
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """The actor's ``old_log_probs`` and ``entropy``, each (rows, response)."""
        assert self.actor is not None
        out = self.actor.forward(batch, ("log_probs", "entropy"), temperature=self._temperature)
        return self.finite(old_log_probs=out["log_probs"], entropy=out["entropy"])

    @register("dp_compute_proto")
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """The reference's ``ref_log_probs`` (rows, response)."""
        assert self.ref is not None
        out = self.ref.forward(batch, ("log_probs",), temperature=self._temperature)
        return self.finite(ref_log_probs=out["log_probs"])

    @register("dp_compute_metric")
    def update_actor(
        self, batch: DataProto, terms: Sequence[LossTerm], counts: Counts, lr_factor: float
    ) -> dict[str, Metric]:
        """One optimizer step of the actor on one mini-batch."""
        assert self.actor is not None
        return self.actor.update(batch, terms, counts, temperature=self._temperature, lr_factor=lr_factor)

    @property
    def _temperature(self) -> float:
        """What logits are divided by: as in sampling, for an algorithm that samples; 1 otherwise, or if greedy."""
        generates = get_registry().find("algorithms", self.config.algorithm.name).spec.generates
        return (self.config.rollout.temperature if self.config.rollout and generates else 1.0) or 1.0

    def close(self) -> None:
        if self.rollout is not None:
            self.rollout.close()
        super().close()
