"""The base classes of config sections. Nothing here, and no config model of a plugin, imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from drivetrain.config.models import RunConfig
    from drivetrain.seam.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing wrong with a config: the dotted key, what is wrong with its value, and what to do about it."""

    key: str
    what: str
    mend: str = ""


@dataclass(frozen=True)
class Written:
    """Marks a path that the run writes. Every other path of a config has to be there before the run starts."""


class Section(BaseModel):
    """A part of the config: unknown keys are refused, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    def departs(self, key: str) -> bool:
        """Whether a setting is another than its default."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)

    def inputs(self) -> Iterator[tuple[str, Path]]:
        """Files and folders that the run reads, each with its key: the values that are a ``Path``, but for those that
        are marked :class:`Written`. A section whose paths are of another type yields them itself."""
        for name, info in type(self).model_fields.items():
            value = getattr(self, name)
            many = isinstance(value, tuple)
            for at, inner in enumerate(value if many else (value,)):
                key = f"{name}.{at}" if many else name
                if isinstance(inner, Section):
                    yield from ((f"{key}.{below}", path) for below, path in inner.inputs())
                elif isinstance(inner, Path) and Written() not in info.metadata:
                    yield key, inner


class PluginConfig(Section):
    """A section that a plugin reads; ``name`` selects the plugin."""

    name: str = Field(description="Name of the plugin.")

    def required_capabilities(self) -> tuple[str, ...]:
        """Capabilities that these settings need some selected plugin to provide."""
        return ()

    def provided_capabilities(self) -> tuple[str, ...]:
        """Capabilities that these settings add to those that the plugin's spec provides."""
        return ()

    def check(self, run: RunConfig, registry: Registry) -> Iterable[Problem]:
        """Yield what is wrong with these settings in the company of the others; keys are relative to the section."""
        return ()


class AlgorithmConfig(PluginConfig):
    """The section ``algorithm``."""

    def roles(self) -> tuple[str, ...]:
        """The models that these settings need besides the rollout, which a plugin's spec announces."""
        return ("actor",)

    def samples_per_prompt(self) -> int:
        """Completions of one prompt in a batch."""
        return 1


class RewardConfig(PluginConfig):
    """One entry of ``rewards``; a reward adds fields of its own."""

    weight: float = Field(1.0, description="Factor of the reward in the sum.")
    label: str | None = Field(None, description="Name in metrics, to tell two rewards of one name apart.")
    timeout_s: float = Field(60.0, gt=0, description="A call for one batch that takes longer stops the run.")


class DatasetConfig(PluginConfig):
    """The sections ``data.train`` and ``data.eval``; a dataset adds fields of its own."""


class OptimizerConfig(PluginConfig):
    """The section ``optimizer``; an optimizer adds fields of its own."""

    lr: float = Field(gt=0, description="Learning rate, before the schedule.")


class RolloutConfig(PluginConfig):
    """The section ``rollout``: sampling, the same for every engine; an engine adds fields of its own."""

    temperature: float = Field(1.0, ge=0, description="Logits are divided by it; 0 takes the most likely token.")
    top_k: int = Field(0, ge=0, description="Draw among the k most likely tokens; 0 draws among all.")
    top_p: float = Field(1.0, gt=0, le=1, description="Draw among the fewest tokens whose probability reaches it.")
    min_p: float = Field(0.0, ge=0, le=1, description="Draw among tokens with this share of the highest probability.")
    max_response_tokens: int = Field(gt=0, description="Longest response, its end-of-sequence token counted.")
    min_response_tokens: int = Field(0, ge=0, description="Shortest response.")
    stop: tuple[str, ...] = Field((), description="Strings that end a response.")
    stop_token_ids: tuple[int, ...] = Field((), description="Tokens that end a response, besides end-of-sequence.")
    ignore_eos: bool = Field(False, description="Go on past the end-of-sequence token (for benchmarks).")

    @property
    def truncates_distribution(self) -> bool:
        """Whether tokens are drawn from less than the whole softmax."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @model_validator(mode="after")
    def _lengths_agree(self) -> RolloutConfig:
        if self.min_response_tokens > self.max_response_tokens:
            raise ValueError(f"min_response_tokens {self.min_response_tokens} exceeds "
                             f"max_response_tokens {self.max_response_tokens}")  # fmt: skip
        return self
