"""Everything that a run stands on: workers, roles, prompts and rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from drivetrain.config import DatasetConfig, ProfilerConfig, RewardConfig, RunConfig
from drivetrain.contracts.placement import Executor, GroupPlan, WorkerGroup
from drivetrain.driver.judging import GenerativeReward
from drivetrain.driver.phases import Phases
from drivetrain.driver.progress import Progress
from drivetrain.driver.prompts import PromptSource
from drivetrain.driver.rewarding import ModelReward, PanelReward, RewardPanel
from drivetrain.driver.roles import ActorRole, CriticRole, PromptsRole, ReferenceRole, RewardsRole, Roles, RolloutRole
from drivetrain.driver.text import ResponseEncoder, load_tokenizer, pad_token_id
from drivetrain.errors import UserError
from drivetrain.seam.registry import get_registry, resolve

POLICY_WORKER = "drivetrain.workers:ActorRolloutRefWorker"
CRITIC_WORKER = "drivetrain.workers:CriticWorker"
REWARD_WORKER = "drivetrain.workers:RewardModelWorker"
JUDGE_WORKER = "drivetrain.workers:GenerativeRewardWorker"


class Session:
    """Workers with their models loaded, and the driver's side of everything.

    Args:
        run: the config.
        announce: called with the name of each phase that starts.
        ranks: called with the phase, how many ranks have answered its call, and of how many.
        training: False leaves out what only training needs (the reference, the critic, the training prompts, profiles).
        scoring: False leaves out the rewards.
        reads: what will be read besides the paths of the config, such as a checkpoint.
    """

    def __init__(
        self, run: RunConfig, *, announce: Callable[[str], None] = lambda _: None,
        ranks: Callable[[str, int, int], None] = lambda *_: None, training: bool = True, scoring: bool = True,
        reads: tuple[Path, ...] = (),
    ) -> None:  # fmt: skip
        self.run = run
        self.progress = Progress()
        self.tokenizer = load_tokenizer(run.model)
        self.train_prompts = self._prompts(run.data.train, "data.train") if training else None
        self.eval_prompts = self._prompts(run.data.eval, "data.eval") if run.data.eval is not None else None
        rewards = [self._reward(section) for section in run.rewards] if scoring else []
        self.executor: Executor = resolve("executors", run.executor.name)(run.executor)
        self.phases = Phases(announce, self._switch, self._take_metrics, ranks)
        try:
            self.placement = self._start(training, scoring, reads)
            if (judge := self.groups.get("reward")) is not None and (section := run.reward_model) is not None:
                scorer = ModelReward(judge) if section.rollout is None else GenerativeReward(judge, section)
                rewards.append(PanelReward(label=section.label, reward=scorer, weight=section.weight,
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

    def _start(self, training: bool, scoring: bool, reads: tuple[Path, ...]) -> str:
        """Start all groups and load their models; returns a line that draws who is where."""
        run, roles, plans = self.run, ["actor"], list[GroupPlan]()
        apart = run.two_groups(get_registry())
        if run.rollout is not None and not apart:
            roles.append("rollout")
        if training and run.critic is not None:
            plans.append(GroupPlan(name="critic", worker=CRITIC_WORKER, roles=("critic",)))
        if scoring and run.reward_model is not None:
            worker = REWARD_WORKER if run.reward_model.rollout is None else JUDGE_WORKER
            plans.append(GroupPlan(name="reward", worker=worker, roles=("reward",)))
        if training and run.ref is not None:
            if run.placement is None or run.placement.pool_of("ref") == run.placement.pool_of("actor"):
                roles.append("ref")
            else:
                plans.append(GroupPlan(name="ref", worker=POLICY_WORKER, roles=("ref",)))
        policy = GroupPlan(name="_".join(roles), worker=POLICY_WORKER, roles=tuple(roles), reads=reads)
        alone = [GroupPlan(name="rollout", worker=POLICY_WORKER, roles=("rollout",))] if apart else []
        self.groups = self.executor.start([policy, *plans, *alone], run)
        self.policy, self.critic = self.groups[policy.name], self.groups.get("critic")
        self.rollout = self.groups.get("rollout", self.policy)
        if training and run.profiler is not None:
            self._prepare_profile(run.profiler)
        self.reference = self.groups.get("ref", self.policy if "ref" in roles else None)
        said = [self._init_model(plan) for plan in (*plans, policy, *alone)]  # the rollout takes the memory left
        if apart:
            address = _ranks(self.policy.call("open_meeting"))[0]
            said.append(self._at_once("connect", address)[0])
        return f"placement: {'; '.join(said)}"

    def _at_once(self, method: str, *args: Any) -> list[Any]:
        """What each rank of the policy, and of the rollout where it has a group, returns of a call to all of them."""
        waits = [group.begin(method, *args) for group in dict.fromkeys((self.policy, self.rollout))]
        return [rank for wait in waits for rank in _ranks(wait())]

    def _init_model(self, plan: GroupPlan) -> str:
        group = self.groups[plan.name]
        group.answered = self.phases.answered
        device = group.call("init_model")
        devices = [device] if isinstance(device, str) else device
        kinds = " and ".join(f"{devices.count(kind)} x {kind}" for kind in dict.fromkeys(devices))
        on = kinds if group.world_size > 1 else device
        return f"{' + '.join(plan.roles)} on {on}" + (f", {group.where}" if group.where else "")

    def _take_metrics(self) -> dict[str, float]:
        """What the groups measured, summed by name, and the memory of the rank that took most."""
        groups = self.groups.values()
        memory = _by_name(max, [part for group in groups for part in _ranks(group.call("take_memory"))])
        return _by_name(sum, [group.take_metrics() for group in groups]) | memory

    def _roles(self) -> Roles:
        pad = pad_token_id(self.tokenizer)
        learning = (self.phases, self.progress, self.run)
        rollout = self.run.rollout is not None
        return Roles(
            actor=ActorRole(self.policy, *learning),
            text=ResponseEncoder(self.tokenizer),
            prompts=PromptsRole(self.train_prompts) if self.train_prompts is not None else None,
            rollout=RolloutRole(self.rollout, self.phases, self.progress, pad) if rollout else None,
            ref=ReferenceRole(self.reference, self.phases) if self.reference is not None else None,
            critic=CriticRole(self.critic, *learning) if self.critic is not None else None,
            rewards=RewardsRole(self.rewards, self.phases) if len(self.rewards) else None,
        )

    def _switch(self, side: str) -> Mapping[str, float]:
        method, args = ("enter_generation", [self.progress.updates]) if side == "generation" else ("enter_training", [])
        return _by_name(max, self._at_once(method, *args))

    def _prepare_profile(self, section: ProfilerConfig) -> None:
        """Raises UserError if no group has a rank that is to be profiled, or the hardware has not the tool."""
        size = max(group.world_size for group in self.groups.values())
        if section.ranks != "all" and max(section.ranks) >= size:
            raise UserError(f"there is no rank {max(section.ranks)}", where="profiler.ranks",
                            mend="choose 0, or all" if size == 1 else f"choose from 0 to {size - 1}, or all",
                            )  # fmt: skip
        for group in self.groups.values():
            group.call("prepare_profile")

    def start_profile(self) -> None:
        """Have the workers profile from here, if ``profiler.steps`` has the step."""
        for name, group in self._profiled():
            others = "" if group is self.policy else f"-{name}"
            group.call("start_profile", f"step-{self.progress.step}{others}")

    def stop_profile(self) -> None:
        """End what :meth:`start_profile` began."""
        for _, group in self._profiled():
            group.call("stop_profile")

    def _profiled(self) -> Iterable[tuple[str, WorkerGroup]]:
        section = self.run.profiler
        return self.groups.items() if section is not None and self.progress.step in section.steps else ()

    def save_models(self, folder: Path, background: bool = False) -> None:
        """Write the workers' state below ``folder``; in the background from copies that are there on return."""
        for group in self._groups():
            group.call("save_checkpoint", folder, background)

    def models_written(self, *, wait: bool) -> bool:
        """Whether all ranks have written what :meth:`save_models` left to the background; raises if one could not."""
        return all([rank for group in self._groups() for rank in _ranks(group.call("checkpoint_written", wait))])

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


def _by_name(merge: Callable[[list[float]], float], parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One number for each name, from those of the parts; a part without it counts as 0."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: merge([part.get(name, 0.0) for part in parts]) for name in names}


def _ranks(found: Any) -> list[Any]:
    """What each rank gave, of a result that is the rank's own where there is one."""
    return found if isinstance(found, list) else [found]
