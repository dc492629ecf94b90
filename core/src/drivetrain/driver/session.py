"""Everything that a run stands on: workers, roles, prompts and rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from drivetrain.config import DatasetConfig, RewardConfig, RunConfig
from drivetrain.contracts.placement import Executor, GroupPlan, WorkerGroup
from drivetrain.driver.phases import Phases
from drivetrain.driver.progress import Progress
from drivetrain.driver.prompts import PromptSource
from drivetrain.driver.rewarding import ModelReward, PanelReward, RewardPanel
from drivetrain.driver.roles import ActorRole, CriticRole, ReferenceRole, RewardsRole, Roles, RolloutRole
from drivetrain.driver.text import ResponseEncoder, load_tokenizer, pad_token_id
from drivetrain.seam.registry import resolve

POLICY_WORKER = "drivetrain.workers:ActorRolloutRefWorker"
CRITIC_WORKER = "drivetrain.workers:CriticWorker"
REWARD_WORKER = "drivetrain.workers:RewardModelWorker"


class Session:
    """Workers with their models loaded, and the driver's side of everything.

    Args:
        run: the config.
        announce: called with the name of each phase that starts.
        training: False leaves out what only training needs (the reference, the critic, the training prompts).
        scoring: False leaves out the reward model.
    """

    def __init__(
        self, run: RunConfig, *, announce: Callable[[str], None] = lambda _: None, training: bool = True,
        scoring: bool = True,
    ) -> None:  # fmt: skip
        self.run = run
        self.progress = Progress()
        self.tokenizer = load_tokenizer(run.model)
        self.train_prompts = self._prompts(run.data.train, "data.train") if training else None
        self.eval_prompts = self._prompts(run.data.eval, "data.eval") if run.data.eval is not None else None
        rewards = [self._reward(section) for section in run.rewards]
        self.executor: Executor = resolve("executors", run.executor.name)(run.executor)
        self.phases = Phases(announce, self._switch)
        try:
            self.policy, self.critic, judge = self._start(training, scoring)
            for group in (self.critic, judge):  # before the rollout, which takes the memory that is left
                if group is not None:
                    group.call("init_model")
            self.placement = f"placement: {' + '.join(self._role_names)} on {self.policy.call('init_model')}"
            if judge is not None and (section := run.reward_model) is not None:
                rewards.append(PanelReward(label=section.label, reward=ModelReward(judge), weight=section.weight,
                                           timeout_s=section.timeout_s))  # fmt: skip
            self.rewards = RewardPanel(rewards, self.tokenizer)
        except BaseException:
            self.close()
            raise
        self.roles = self._roles()

    def _prompts(self, section: DatasetConfig, where: str) -> PromptSource:
        dataset = resolve("datasets", section.name)(section)
        return PromptSource(dataset, self.tokenizer, self.run.data, self.run.trainer.seed, where=where)

    @staticmethod
    def _reward(section: RewardConfig) -> PanelReward:
        return PanelReward(label=section.label or section.name, reward=resolve("rewards", section.name)(section),
                           weight=section.weight, timeout_s=section.timeout_s)  # fmt: skip

    def _start(self, training: bool, scoring: bool) -> tuple[WorkerGroup, WorkerGroup | None, WorkerGroup | None]:
        roles = ["actor"]
        if self.run.rollout is not None:
            roles.append("rollout")
        if training and self.run.ref is not None:
            roles.append("ref")
        plans = [GroupPlan(name="_".join(roles), worker=POLICY_WORKER, roles=tuple(roles))]
        if training and self.run.critic is not None:
            plans.append(GroupPlan(name="critic", worker=CRITIC_WORKER, roles=("critic",)))
        if scoring and self.run.reward_model is not None:
            plans.append(GroupPlan(name="reward", worker=REWARD_WORKER, roles=("reward",)))
        groups = self.executor.start(plans, self.run)
        self._role_names = tuple(role for plan in plans for role in plan.roles)
        return groups[plans[0].name], groups.get("critic"), groups.get("reward")

    def _roles(self) -> Roles:
        pad = pad_token_id(self.tokenizer)
        has, learning = self._role_names, (self.phases, self.progress, self.run)
        return Roles(
            actor=ActorRole(self.policy, *learning),
            text=ResponseEncoder(self.tokenizer),
            rollout=RolloutRole(self.policy, self.phases, self.progress, pad) if "rollout" in has else None,
            ref=ReferenceRole(self.policy, self.phases) if "ref" in has else None,
            critic=CriticRole(self.critic, *learning) if self.critic is not None else None,
            rewards=RewardsRole(self.rewards, self.phases) if len(self.rewards) else None,
        )

    def _switch(self, side: str) -> Mapping[str, float]:
        if side == "generation":
            return self.policy.call("enter_generation", self.progress.updates)  # type: ignore[no-any-return]
        return self.policy.call("enter_training")  # type: ignore[no-any-return]

    def save_models(self, folder: Path) -> None:
        """Write the workers' state below ``folder``."""
        for group in self._groups():
            group.call("save_checkpoint", folder)

    def load_models(self, folder: Path) -> None:
        """Read the workers' state of a checkpoint."""
        for group in self._groups():
            group.call("load_checkpoint", folder)
        self.phases.weights_changed()

    def _groups(self) -> list[WorkerGroup]:
        return [self.policy] if self.critic is None else [self.policy, self.critic]

    def close(self) -> None:
        """End the workers."""
        self.executor.shutdown()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
