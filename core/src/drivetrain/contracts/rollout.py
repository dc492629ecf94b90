"""The contract of a generation engine. The primitive is asynchronous; batches are derived here."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from drivetrain.contracts.mesh import RankLayout

if TYPE_CHECKING:
    from torch import nn

    from drivetrain.config import ModelConfig, RolloutConfig
    from drivetrain.contracts.hardware import Hardware
    from drivetrain.weights import WeightStream


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to draw tokens. What ends a response stays in it and is counted: end-of-sequence, stop token or string."""

    temperature: float = 1.0  # 0 takes the most likely token; otherwise logits are divided by it
    top_k: int = 0  # keep the k most likely tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set of tokens whose probability reaches it
    min_p: float = 0.0  # keep tokens whose probability is at least this share of the most likely one's
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # besides the end-of-sequence token
    stop: tuple[str, ...] = ()  # the tokens up to the one that completes the string stay
    ignore_eos: bool = False  # go on past the end-of-sequence token


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt and the samples wanted of it, one for each seed.

    The same seed, prompt and weights give the same tokens, wherever and beside whatever the sample is drawn.
    """

    request_id: str  # unique among the requests under way
    prompt_token_ids: tuple[int, ...]  # never tokenized again
    seeds: tuple[int, ...]  # of 64 bits
    sampling: SamplingParams


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sample of a request."""

    request_id: str
    sample: int  # index of its seed
    token_ids: tuple[int, ...]  # what ended the response included
    log_probs: tuple[float, ...]  # of each token under the distribution that it was drawn from
    finish_reason: Literal["stop", "length", "abort"]
    weight_versions: tuple[tuple[int, int], ...]  # spans (first token, version); one unless weights changed on the way
    extras: Mapping[str, Any] = field(default_factory=dict)  # what else an engine can tell, such as routed experts


@dataclass(frozen=True, kw_only=True)
class RolloutContext:
    """What an engine is told about the run it serves."""

    model: ModelConfig  # its folder holds the tokenizer
    hardware: Hardware  # of this process
    rank: int  # among the processes of the worker group
    world_size: int
    seed: int  # of the run
    receives_weights: bool = False  # it is sent weights before it generates, and need not read any


class RolloutEngine(ABC):
    """Draws completions from the policy, or from a reward model that generates.

    Keys that its errors name start at the section that holds ``model`` and ``rollout``.

    Capabilities that its spec may provide: ``rollout.log_probs`` (of the sampled tokens), ``rollout.live_module``
    (it can run the trainer's own module), ``rollout.own_weights`` (until it is given others it generates with those in
    the model's folder), ``rollout.load_weights``, ``rollout.adapter`` (by its settings it may be sent an adapter alone,
    to the weights in the model's folder), ``rollout.sleep``.
    """

    def __init__(self, config: RolloutConfig, context: RolloutContext) -> None:
        self.config = config
        self.context = context
        self.weight_version = 0

    @property
    def layout(self) -> RankLayout:
        """Where this rank stands in the mesh ``rollout``; ranks of one dp index are given the same requests."""
        return RankLayout(dp=self.context.rank, dp_size=self.context.world_size)

    @abstractmethod
    def initialize(self) -> None:
        """Get ready; an engine that measures free memory does so here, after the trainers have theirs."""

    @abstractmethod
    def generate(self, request: GenerationRequest) -> AsyncIterator[Completion]:
        """Yield the request's samples as they finish, in any order."""

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """End a request; what it has so far is yielded with ``finish_reason="abort"``."""

    @abstractmethod
    async def pause(self) -> None:
        """Stop drawing tokens at the next token boundary, keeping what is under way."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on after :meth:`pause`."""

    def attach(self, module: nn.Module) -> None:
        """Generate with the trainer's module in place of weights of one's own (capability ``live_module``)."""
        raise TypeError(f"rollout {self.config.name!r} does not offer rollout.live_module")

    def load_weights(self, stream: WeightStream, version: int) -> None:
        """Replace all weights, or the adapter, by the stream's, check that nothing is missing or doubled, and forget
        cached prefixes."""
        raise TypeError(f"rollout {self.config.name!r} does not offer rollout.load_weights")

    def sleep(self, parts: Collection[str] = ("weights", "kv_cache")) -> None:
        """Free the device memory of the parts; others of them may be asleep already."""

    def wake(self, parts: Collection[str] = ("weights", "kv_cache")) -> None:
        """Take the device memory of the parts back; weights are undefined until loaded."""

    def close(self) -> None:
        """Let go of devices and processes."""

    def generate_batch(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Run all requests together and return each one's samples in the order of its seeds."""

        async def samples(request: GenerationRequest) -> list[Completion]:
            done = [completion async for completion in self.generate(request)]
            return sorted(done, key=lambda completion: completion.sample)

        async def everything() -> list[list[Completion]]:
            return await asyncio.gather(*map(samples, requests))

        return asyncio.run(everything())
