"""Plugins that stand for engines and algorithms, and a config that selects them."""

from __future__ import annotations

from collections.abc import Callable

from drivetrain.config.resolve import Resolved

Load = Callable[..., Resolved]
Refused = Callable[..., list[str]]
Program = Callable[..., int]

PLUGIN = """
    from drivetrain import (
        AlgorithmSpec, BackendSpec, ConfigAliasSpec, OptimizerSpec, RewardSpec, RolloutSpec, hookimpl
    )

    @hookimpl
    def drivetrain_algorithms():
        needs = ("backend.train", "rollout.log_probs")
        for name in ("group", "critic"):
            yield AlgorithmSpec(name=name, summary=f"Does {name}.", factory="none:none",
                                config=f"{package}.sections:{name.title()}Config", requires=needs)
        yield AlgorithmSpec(name="imitate", summary="Does imitate.", factory="none:none", requires=needs[:1],
                            config="{package}.sections:ImitateConfig", rewards=False, generates=False)
        yield AlgorithmSpec(name="unsound", summary="", factory="none:none", config="{package}.sections:NoSection")
        yield AlgorithmSpec(name="heavy", summary="", factory="none:none", config="{package}.gone:Config")

    @hookimpl
    def drivetrain_backends():
        for name, provides in (("mini", ("backend.train",)), ("frozen", ()), ("judge", ("backend.scores",)),
                               ("able", ("backend.train", "backend.scores"))):
            yield BackendSpec(name=name, summary="", factory="none:none", config="{package}.sections:MiniConfig",
                              provides=("backend.live_module", *provides))

    @hookimpl
    def drivetrain_rollouts():
        for name, provides in (("say", ("rollout.log_probs", "rollout.own_weights")), ("mute", ())):
            yield RolloutSpec(name=name, summary="", factory="none:none",
                              provides=("rollout.live_module", *provides))

    @hookimpl
    def drivetrain_optimizers():
        yield OptimizerSpec(name="step", summary="", factory="none:none", config="{package}.sections:StepConfig")
        yield OptimizerSpec(name="bare", summary="", factory="none:none")

    @hookimpl
    def drivetrain_rewards():
        yield RewardSpec(name="words", summary="", factory="none:none", config="{package}.sections:WordsConfig")

    @hookimpl
    def drivetrain_config_aliases():
        yield ConfigAliasSpec(name="theirs", summary="", aliases={
            "their.optim.lr": "actor.optimizer.lr", "their.sampling.*": "rollout.*", "their.judges": "rewards",
        })
"""
SECTIONS = """
    from typing import Literal, Union
    from pydantic import BaseModel, Field
    from drivetrain.config import AlgorithmConfig, OptimizerConfig, PluginConfig, Problem, RewardConfig, Section

    class GroupConfig(AlgorithmConfig):
        group_size: int = Field(8, ge=2, description="Samples of a prompt.")
        kl_coef: float = Field(0.0, ge=0, description="Weight of the KL divergence.")
        epochs: int = 1
        extras: dict = {}

        def roles(self):
            return ("actor", "ref") if self.kl_coef > 0 else ("actor",)

        def check(self, run, registry):
            if run.rollout is not None and run.rollout.temperature == 0:
                yield Problem(key="group_size", what="samples of a group are all alike", mend="raise the temperature")

    class CriticConfig(AlgorithmConfig):
        gamma: float = 1.0
        epochs: int = 1

        def roles(self):
            return ("actor", "critic")

    class ImitateConfig(AlgorithmConfig):
        epochs: int = 1
        needs_reference: bool = False

        def required_capabilities(self):
            return ("backend.reference",) if self.needs_reference else ()

    class NoSection(BaseModel):
        name: str

    class Sharding(Section):
        ranks: int = Field(1, ge=1, description="Ranks of a shard.")

    class Parts(Section):
        kind: Literal["parts"] = "parts"
        count: int = 1

    class MiniConfig(PluginConfig):
        sharding: Sharding = Sharding()
        plan: Union[Parts, None] = None
        offload: bool = False
        adapter: bool = False

        def provided_capabilities(self):
            return ("backend.reference",) if self.adapter else ()

        def required_capabilities(self):
            return ("hardware.spare_memory",) if self.offload else ()

    class StepConfig(OptimizerConfig):
        momentum: float = Field(0.9, ge=0, lt=1, description="Share of the old step.")
        betas: tuple[float, float] = (0.9, 0.99)

    class WordsConfig(RewardConfig):
        words: tuple[str, ...] = ()
"""
RUN = """\
model:
  path: some/model
algorithm:
  name: group
  group_size: 4
actor:
  backend: {name: mini}
  optimizer:
    name: step
    lr: 3e-4
  mini_batch_prompts: 8
rollout: {name: say, max_response_tokens: 5}
data:
  batch_prompts: 16
  train: {name: jsonl, path: train.jsonl}
rewards:
  - {name: exact_match}
  - name: words
    words: [yes it is, 'no']
trainer:
  steps: 10
"""
