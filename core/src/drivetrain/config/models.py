"""The shape of a run's config. Sections that a plugin reads are marked with the hook that offers their names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, SerializeAsAny, model_validator

from drivetrain.config.base import (
    AlgorithmConfig,
    DatasetConfig,
    OptimizerConfig,
    PluginConfig,
    RewardConfig,
    RolloutConfig,
    Section,
    Written,
)

if TYPE_CHECKING:
    from drivetrain.seam.registry import Registry

TWO_GROUPS = "hybrid_engine.two_groups"
"""Capability of a hybrid engine whose rollout lives in a worker group of its own."""


@dataclass(frozen=True)
class Offered:
    """Marks a section whose ``name`` is looked up among the offers of a hook."""

    hook: str


class ModelConfig(Section):
    """The policy, and the start of every model derived from it."""

    path: Path = Field(description="Hugging Face folder with config, weights and tokenizer.")
    tokenizer: Path | None = Field(None, description="Folder of the tokenizer, if it is not the model's.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Type that weights are held in.")
    init: Literal["pretrained", "random"] = Field(
        "pretrained", description="Read the weights, or draw new ones from the folder's config and the run's seed."
    )
    trust_remote_code: bool = Field(False, description="Run model code that the folder brings along.")

    @property
    def tokenizer_path(self) -> Path:
        """Folder of the tokenizer."""
        return self.tokenizer or self.path


class ScheduleConfig(Section):
    """Course of the learning rate over the steps of the run."""

    name: Literal["constant", "linear", "cosine"] = Field(default="constant", description="Course after the warm-up.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps in which the learning rate rises linearly.")
    min_factor: float = Field(default=0.0, ge=0, le=1, description="Lowest factor that linear and cosine come down to.")


class TrainableConfig(Section):
    """A model that learns."""

    backend: Annotated[SerializeAsAny[PluginConfig], Offered("backends")]
    optimizer: Annotated[SerializeAsAny[OptimizerConfig], Offered("optimizers")]
    schedule: ScheduleConfig = ScheduleConfig()
    max_grad_norm: float | None = Field(1.0, gt=0, description="Gradients are scaled down to this 2-norm.")


class ActorConfig(TrainableConfig):
    """The policy that learns."""

    mini_batch_prompts: int | None = Field(
        None, gt=0, description="Prompts of one optimizer step; it divides data.batch_prompts. Omitted: all of them."
    )


class CriticConfig(TrainableConfig):
    """The model that estimates values. Without ``backend.name``, all that is not set derives from the actor."""

    model: ModelConfig | None = Field(default=None, description="Another model to start from than the actor's.")


class ReferenceConfig(Section):
    """The frozen policy that KL is measured to. Without ``backend.name``, what is not set derives from the actor's."""

    backend: Annotated[SerializeAsAny[PluginConfig], Offered("backends")]
    model: ModelConfig | None = Field(default=None, description="Another model than the one the actor starts from.")


class JudgeConfig(Section):
    """What a reward model that generates is asked, and how the number in its verdict is found."""

    prompt: str = Field(
        description="Text with {response}, and perhaps {prompt} and {answer}; a message of the user where the tokenizer"
        " of the reward model has a chat template."
    )
    pattern: str = Field(
        r"^\s*(-?\d+(?:\.\d+)?)\s*$",
        description="Regular expression whose last match in the verdict is the number, or its first group is, if it has"
        " groups. The default reads a verdict that is nothing but a number.",
    )
    min: float | None = Field(None, description="A verdict below it counts as unreadable.")
    max: float | None = Field(None, description="A verdict above it counts as unreadable.")
    correct_above: float | None = Field(
        None, description="A response with a higher score is right, one with another is wrong. Omitted: none is judged."
    )
    verdict_retries: int = Field(
        2, ge=0, description="How often an unreadable verdict is drawn anew, where rollout.temperature is above 0."
    )

    @model_validator(mode="after")
    def _is_readable(self) -> JudgeConfig:
        if "{response}" not in self.prompt:
            raise ValueError("prompt lacks {response}")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern is no regular expression: {error}") from error
        if self.min is not None and self.max is not None and self.min >= self.max:
            raise ValueError(f"min {self.min:g} is not below max {self.max:g}")
        return self


class RewardModelConfig(Section):
    """A model whose score of a text joins the sum of the rewards: a classifier or regressor, or, with ``rollout`` and
    ``judge``, a language model that generates its verdict. It does not learn."""

    model: ModelConfig = Field(
        description="A Hugging Face folder with its own tokenizer and a sequence classifier, or, with rollout, a causal"
        " language model."
    )
    rollout: Annotated[SerializeAsAny[RolloutConfig] | None, Offered("rollouts")] = Field(
        None, description="What generates verdicts, and how they are drawn. Omitted: the model is a classifier."
    )
    judge: JudgeConfig | None = Field(None, description="How verdicts are asked for and read; rollout needs it.")
    backend: Annotated[SerializeAsAny[PluginConfig] | None, Offered("backends")] = Field(
        None, description="What runs it. Omitted, it derives from the actor's."
    )
    weight: float = Field(1.0, description="Factor of the score in the sum.")
    label: str = Field("reward_model", min_length=1, description="Name in metrics.")
    timeout_s: float = Field(600.0, gt=0, description="A call for one batch that takes longer stops the run.")
    output: Literal["logit", "probability", "log_odds"] = Field(
        "logit",
        description="What of the label is the score: its logit; its probability, softmax over the labels, or sigmoid"
        " where there is one; or log p / (1 - p) of that probability.",
    )
    label_index: int | None = Field(
        None, ge=0, description="The label that is the score; a classifier with several needs it."
    )
    format: Literal["chat", "text", "pair"] | None = Field(
        None,
        description="chat: by the chat template of the tokenizer; text: the prompt, then the response; pair: the two as"
        " separate texts of an encoder. Omitted: chat for chat messages if the tokenizer has a template, else text.",
    )
    max_tokens: int | None = Field(
        None,
        gt=0,
        description="Longest prompt and response in tokens of its tokenizer. Omitted: as the tokenizer says.",
    )
    overlong: Literal["error", "truncate_left"] = Field(
        "error",
        description="What happens to a longer text: the run stops, or the prompt loses its first tokens. A response is"
        " never cut.",
    )

    @model_validator(mode="after")
    def _is_read(self) -> RewardModelConfig:
        if self.model.init == "random":
            raise ValueError("a reward model is read from its folder; model.init is pretrained")
        return self


class DataConfig(Section):
    """Prompts, and how they become tokens."""

    train: Annotated[SerializeAsAny[DatasetConfig], Offered("datasets")]
    eval: Annotated[SerializeAsAny[DatasetConfig] | None, Offered("datasets")] = None
    batch_prompts: int = Field(gt=0, description="Prompts of one step.")
    shuffle: bool = Field(True, description="A new order each epoch, drawn from the run's seed.")
    max_prompt_tokens: int = Field(1024, gt=0, description="Longest prompt.")
    overlong: Literal["error", "filter", "truncate_left", "truncate_right"] = Field(
        "error", description="What happens to a longer prompt."
    )
    template: str | None = Field(
        None, description="Text around a plain prompt, with {prompt}; omitted, the prompt as it is."
    )
    chat: bool | None = Field(
        None, description="Use the tokenizer's chat template. Omitted: if it has one and no template is given."
    )

    @model_validator(mode="after")
    def _template_has_prompt(self) -> DataConfig:
        if self.template is not None and "{prompt}" not in self.template:
            raise ValueError("template lacks {prompt}")
        return self


class EvaluationConfig(Section):
    """How held-out prompts are answered."""

    temperature: float = Field(default=0.0, ge=0, description="0 takes the most likely token.")
    samples: int = Field(default=1, gt=0, description="Completions of each prompt.")
    batch_prompts: int = Field(default=256, gt=0, description="Prompts that are answered together.")


class HealthConfig(Section):
    """When a run warns that it goes wrong; null turns a warning off. Figures are means over five steps."""

    entropy_below: float | None = Field(
        default=0.1, gt=0, description="Entropy, as a share of that in the first steps."
    )
    kl_above: float | None = Field(
        default=1.0, gt=0, description="KL divergence from the reference, or within a step's updates, in nats a token."
    )
    length_above: float | None = Field(
        default=1.5, gt=0, description="Tokens of a response over those in the first steps, while most are cut off."
    )
    dead_prompts_above: float | None = Field(
        default=0.9, gt=0, le=1, description="Share of completions that score as all others of their prompt."
    )
    mismatch_above: float | None = Field(
        default=0.02, gt=0, description="Distance of trainer's and rollout's log-probs, nats a token; from step 1 on."
    )
    ess_below: float | None = Field(
        default=0.3, gt=0, le=1, description="Effective sample size, as a share of the tokens; from step 1 on."
    )


class TrainerConfig(Section):
    """The loop."""

    steps: int = Field(gt=0, description="Steps of the run.")
    seed: int = Field(1, ge=0, description="Every random number of the run derives from it.")
    run_dir: Annotated[Path, Written()] = Field(Path("runs/run"), description="Run folder.")
    eval_every: int = Field(0, ge=0, description="Steps between evaluations on data.eval; 0: at start and end alone.")
    save_every: int = Field(0, ge=0, description="Steps between checkpoints; 0: at the end alone.")
    save_in_background: bool = Field(
        False,
        description="Write checkpoints while training goes on: a step waits until the state is copied to the host's"
        " memory, which holds it until the next save.",
    )
    log_every: int = Field(1, gt=0, description="Steps between lines of metrics.")
    keep_checkpoints: int = Field(2, gt=0, description="Checkpoints that are kept; older ones are removed.")
    best_metric: str | None = Field(
        None, description="Metric, such as eval/accuracy, by which the best checkpoint is kept too."
    )
    best_is: Literal["highest", "lowest"] = Field("highest", description="Which value of best_metric is the best.")
    health: HealthConfig = HealthConfig()
    eval: EvaluationConfig = EvaluationConfig()


class ProfilerConfig(Section):
    """What the workers' processes do in chosen steps, with every call and phase by its name. Omitted: nothing is
    recorded, and nothing is paid for it."""

    steps: tuple[Annotated[int, Field(gt=0)], ...] = Field(min_length=1, description="Steps that are profiled, from 1.")
    ranks: Literal["all"] | tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (0,), min_length=1, description="Ranks of each worker group that are profiled, or all."
    )
    tool: Literal["torch", "nsys", "memory"] = Field(
        "torch",
        description="torch: a trace of torch.profiler and a table of what took most time; nsys: ranges for"
        " Nsight Systems, which has to be around the process; memory: every allocation on the device, for torch's"
        " memory viewer.",
    )
    folder: str = Field("profile", min_length=1, description="Where files go, below the run folder.")


class PlacementConfig(Section):
    """Which role runs where. Roles of one pool share its devices."""

    pools: dict[str, tuple[Annotated[int, Field(gt=0)], ...]] = Field(
        min_length=1, description="Pools of processes by name, each as its number of processes on every node."
    )
    roles: dict[Literal["actor", "rollout", "critic", "ref", "reward"], str] = Field(
        default={}, description="Pool of each role. Omitted: the actor's, which one pool need not say."
    )

    def pool_of(self, role: str) -> str:
        """Name of a role's pool."""
        own = {**self.roles}.get(role) or self.roles.get("actor")  # type: ignore[call-overload]
        return str(own or next(iter(self.pools)))

    @model_validator(mode="after")
    def _pools_are_there(self) -> PlacementConfig:
        if empty := [name for name, nodes in self.pools.items() if not nodes]:
            raise ValueError(f"pool {empty[0]!r} has no processes")
        if len(self.pools) > 1 and "actor" not in self.roles:
            raise ValueError("with several pools, roles has to say which one is the actor's")
        for role, pool in self.roles.items():
            if pool not in self.pools:
                raise ValueError(f"role {role} is in pool {pool!r}; there are {', '.join(self.pools)}")
        if unused := set(self.pools) - {*self.roles.values(), self.pool_of("actor")}:
            raise ValueError(f"no role is in pool {min(unused)!r}")
        return self


class RunConfig(Section):
    """A whole run."""

    model: ModelConfig
    algorithm: Annotated[SerializeAsAny[AlgorithmConfig], Offered("algorithms")]
    actor: ActorConfig
    rollout: Annotated[SerializeAsAny[RolloutConfig] | None, Offered("rollouts")] = None
    critic: CriticConfig | None = None
    ref: ReferenceConfig | None = None
    hybrid_engine: Annotated[SerializeAsAny[PluginConfig], Offered("hybrid_engines")]
    data: DataConfig
    rewards: tuple[Annotated[SerializeAsAny[RewardConfig], Offered("rewards")], ...] = ()
    reward_model: RewardModelConfig | None = None
    executor: Annotated[SerializeAsAny[PluginConfig], Offered("executors")]
    placement: PlacementConfig | None = None
    hardware: Annotated[SerializeAsAny[PluginConfig], Offered("hardware")]
    trackers: tuple[Annotated[SerializeAsAny[PluginConfig], Offered("trackers")], ...]
    trainer: TrainerConfig
    profiler: ProfilerConfig | None = None

    def processes_of(self, role: str) -> int | None:
        """How many processes the config gives a role: those of its pool, or the executor's; None if it does not say."""
        if self.placement is not None:
            return sum(self.placement.pools[self.placement.pool_of(role)])
        return getattr(self.executor, "processes", None)

    def two_groups(self, registry: Registry) -> bool:
        """Whether the rollout is a worker group of its own, as the hybrid engine wants it."""
        engine = registry.select("hybrid_engines", self.hybrid_engine.name).spec
        return self.rollout is not None and TWO_GROUPS in engine.provides

    @property
    def actor_is_reference(self) -> bool:
        """Whether the actor's backend computes the reference as well, so that no second model is loaded for it."""
        if self.ref is None or self.ref.model is not None:
            return False
        together = self.placement is None or self.placement.pool_of("ref") == self.placement.pool_of("actor")
        backends = (self.actor.backend, self.ref.backend)
        return together and all("backend.reference" in backend.provided_capabilities() for backend in backends)
