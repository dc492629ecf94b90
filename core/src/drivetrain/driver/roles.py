"""The models and rewards as an algorithm sees them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from drivetrain.config import RunConfig, ScheduleConfig
from drivetrain.contracts.algorithm import LossTerm
from drivetrain.contracts.placement import WorkerGroup
from drivetrain.driver.phases import Phases
from drivetrain.driver.progress import Progress
from drivetrain.driver.schedule import lr_factor
from drivetrain.metrics import Metric
from drivetrain.numerics import Counts, group_index
from drivetrain.protocol import DataProto
from drivetrain.seeds import derive_seed

if TYPE_CHECKING:
    from drivetrain.driver.prompts import PromptSource
    from drivetrain.driver.rewarding import RewardPanel
    from drivetrain.driver.text import ResponseEncoder

TEXTS = ("raw_prompt", "messages", "response_text", "rejected_text", "answer", "extra")  # what no model reads
OF_UPDATES = ("loss", "grad_norm", "lr")  # metrics of an optimizer step, whatever its terms


def without_texts(batch: DataProto) -> DataProto:
    """What the worker of a model gets of a batch: sending texts would take longer than sending tokens."""
    return batch.select(non_tensor_batch_keys=[name for name in batch.non_tensor_batch if name not in TEXTS])


class PromptsRole:
    """The run's training prompts, beyond those that each step begins with."""

    def __init__(self, source: PromptSource) -> None:
        self._source = source

    def draw(self, prompts: int) -> DataProto:
        """The next prompts of the run, as ``collect`` gets them; no later step gets these again within the epoch."""
        return self._source.next_batch(prompts)


class RolloutRole:
    """Generates with the actor's current weights."""

    def __init__(self, group: WorkerGroup, phases: Phases, progress: Progress, pad_token_id: int) -> None:
        self._group, self._phases, self._progress = group, phases, progress
        self._pad_token_id = pad_token_id

    @cached_property
    def shares_weights(self) -> bool:
        """Whether it runs the actor's own module on every rank, so that it differs from the trainer in nothing."""
        shares = self._group.call("shares_weights")
        return all(shares) if isinstance(shares, list) else bool(shares)

    def generate(
        self, prompts: DataProto, *, samples: int = 1, temperature: float | None = None, phase: str = "generate"
    ) -> DataProto:
        """Draw completions.

        Args:
            prompts: ``input_ids``, ``attention_mask`` (prompts, prompt) and ``uid``.
            samples: completions of each prompt.
            temperature: in place of the config's.

        Returns:
            (prompts x samples) rows with ``responses``, ``response_mask``, ``rollout_log_probs`` and the rest.
        """
        wanted = {"samples": samples, "step": self._progress.step, "pad_token_id": self._pad_token_id,
                  "recompute_log_probs": False}  # fmt: skip
        if temperature is not None:
            wanted["temperature"] = temperature  # type: ignore[assignment]
        request = prompts.with_columns()
        request.meta_info = {**prompts.meta_info, **wanted}
        with self._phases(phase, side="generation"):
            batch: DataProto = self._group.call("generate_sequences", request)
        return batch


class LearningRole:
    """A model that learns, from mini-batches."""

    def __init__(self, group: WorkerGroup, phases: Phases, progress: Progress, run: RunConfig) -> None:
        self._group, self._phases, self._progress, self._run = group, phases, progress, run

    @property
    def mini_batch_prompts(self) -> int | None:
        """What the number of prompts of a batch must divide by; None: a batch is one mini-batch."""
        return self._run.actor.mini_batch_prompts

    def mini_batches(self, batch: DataProto, epoch: int = 0) -> Iterator[DataProto]:
        """The batch in mini-batches of ``actor.mini_batch_prompts`` prompts, in an order drawn for the epoch.

        Rows of one prompt, and rows of one ``loss_group``, stay together.
        """
        size = self._run.actor.mini_batch_prompts
        prompts = len(set(batch.non_tensor_batch["uid"].tolist()))
        if size is None or size == prompts:
            yield batch
        else:
            seed = derive_seed(self._run.trainer.seed, "mini_batches", self._progress.step, epoch)
            yield from batch.mini_batches(size, seed=seed)

    def _update(self, method: str, phase: str, schedule: ScheduleConfig, batch: DataProto, terms: Sequence[LossTerm]
                ) -> dict[str, Metric]:  # fmt: skip
        counts = Counts.of(batch["response_mask"], group_index(batch.non_tensor_batch["uid"]))
        factor = lr_factor(schedule, max(1, self._progress.step), self._run.trainer.steps)
        with self._phases(phase, side="training"):
            active = [term for term in terms if term.weight != 0]
            metrics: dict[str, Metric] = self._group.call(method, without_texts(batch), active, counts, factor)
        return metrics


class ActorRole(LearningRole):
    """The policy that learns."""

    def log_probs(self, batch: DataProto) -> DataProto:
        """The batch with the actor's ``old_log_probs`` and ``entropy`` of the responses, each (rows, response)."""
        with self._phases("log_probs", side="training"):
            return batch.union(self._group.call("compute_log_prob", without_texts(batch)))

    def update(self, batch: DataProto, *terms: LossTerm) -> dict[str, Metric]:
        """One optimizer step on a mini-batch; the objective is the sum of ``weight * term``.

        Returns:
            metrics of the terms, and ``loss``, ``grad_norm``, ``lr``.
        """
        metrics = self._update("update_actor", "update", self._run.actor.schedule, batch, terms)
        self._progress.updates += 1
        self._phases.weights_changed()
        return metrics


class CriticRole(LearningRole):
    """The model that estimates values; its mini-batches are those of the actor."""

    def values(self, batch: DataProto) -> DataProto:
        """The batch with the critic's ``values`` before each token of the responses (rows, response)."""
        with self._phases("values", side="training"):
            return batch.union(self._group.call("compute_values", without_texts(batch)))

    def update(self, batch: DataProto, *terms: LossTerm) -> dict[str, Metric]:
        """One optimizer step on a mini-batch; the objective is the sum of ``weight * term``.

        Returns:
            metrics of the terms, and ``critic_loss``, ``critic_grad_norm``, ``critic_lr``.
        """
        assert self._run.critic is not None
        metrics = self._update("update_critic", "update_critic", self._run.critic.schedule, batch, terms)
        return {f"critic_{name}" if name in OF_UPDATES else name: metric for name, metric in metrics.items()}


class ReferenceRole:
    """The frozen policy that KL is measured to."""

    def __init__(self, group: WorkerGroup, phases: Phases) -> None:
        self._group, self._phases = group, phases

    def log_probs(self, batch: DataProto) -> DataProto:
        """The batch with the reference's ``ref_log_probs`` of the responses (rows, response)."""
        with self._phases("ref_log_probs", side="training"):
            return batch.union(self._group.call("compute_ref_log_prob", without_texts(batch)))


class RewardsRole:
    """The rewards of the config, weighted and guarded."""

    def __init__(self, panel: RewardPanel, phases: Phases) -> None:
        self._panel, self._phases = panel, phases

    def score(self, batch: DataProto) -> DataProto:
        """The batch with ``token_level_scores`` (rows, response), ``scores``, ``correct`` and ``reward/<label>``."""
        with self._phases("reward"):
            return self._panel.score(batch)


class Roles:
    """Everything that an algorithm may call. A role that the config does not have raises when it is touched."""

    def __init__(
        self,
        *,
        actor: ActorRole,
        text: ResponseEncoder,
        prompts: PromptsRole | None = None,
        rollout: RolloutRole | None = None,
        ref: ReferenceRole | None = None,
        critic: CriticRole | None = None,
        rewards: RewardsRole | None = None,
    ) -> None:
        self.actor = actor
        self.text = text
        self._optional = {"prompts": prompts, "rollout": rollout, "ref": ref, "critic": critic, "rewards": rewards}

    @property
    def prompts(self) -> PromptsRole:
        """Further training prompts."""
        role: PromptsRole = self._get("prompts")
        return role

    @property
    def rollout(self) -> RolloutRole:
        """The generation engine."""
        role: RolloutRole = self._get("rollout")
        return role

    @property
    def ref(self) -> ReferenceRole:
        """The reference policy; an algorithm gets it by naming ``ref`` in its config's ``roles()``."""
        role: ReferenceRole = self._get("ref")
        return role

    @property
    def critic(self) -> CriticRole:
        """The critic; an algorithm gets it by naming ``critic`` in its config's ``roles()``."""
        role: CriticRole = self._get("critic")
        return role

    @property
    def rewards(self) -> RewardsRole:
        """The rewards of the config."""
        role: RewardsRole = self._get("rewards")
        return role

    def _get(self, name: str) -> Any:
        role = self._optional[name]
        if role is None:
            raise AttributeError(f"this run has no role {name!r}; the algorithm's config names its roles in roles()")
        return role
