"""The rollout ``hf``: requests come in as they like, one task decodes them together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn

from drivetrain import (
    Completion,
    GenerationRequest,
    RolloutContext,
    RolloutEngine,
    RunError,
    UserError,
    end_of_sequence_ids,
)
from drivetrain.weights import WeightStream
from drivetrain_rollout_hf.config import HFRolloutConfig
from drivetrain_rollout_hf.decode import Decoder, Row
from drivetrain_rollout_hf.model import check_supported, evaluation_mode, load_own, text_config
from drivetrain_rollout_hf.receiving import receive
from drivetrain_rollout_hf.stopping import StopStrings, load_tokenizer


@dataclass(eq=False)
class _Job:
    """A request under way: its rows, and where its completions or its error go."""

    request_id: str
    rows: list[Row] = field(default_factory=list)
    results: asyncio.Queue[Completion | Exception] = field(default_factory=asyncio.Queue)

    def deliver(self, row: Row) -> None:
        assert row.finish_reason is not None
        self.results.put_nowait(
            Completion(
                request_id=self.request_id, sample=row.sample, token_ids=tuple(row.tokens),
                log_probs=tuple(row.log_probs), finish_reason=row.finish_reason, weight_versions=tuple(row.versions),
            )
        )  # fmt: skip


class HFRollout(RolloutEngine):
    """Generates with a transformers model: the trainer's own, if one is attached, or one read from the folder.

    Requests that are made in the same turn of the event loop start together; later ones join those under way. The
    decoding task gives way to others after every token. Keys and values of rows under way are kept when weights
    change; the completion's ``weight_versions`` say which token is from which.
    """

    def __init__(self, config: HFRolloutConfig, context: RolloutContext) -> None:
        super().__init__(config, context)
        self._most_rows = config.max_batch_sequences
        self._module: nn.Module | None = None
        self._attached = False
        self._decoder: Decoder | None = None
        self._unusable: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._jobs: dict[str, _Job] = {}
        self._waiting: deque[Row] = deque()
        self._paused = False
        self._decoding = False  # the module is in evaluation mode
        self._resumed = asyncio.Event()

    def initialize(self) -> None:
        """Read the tokenizer. Weights of the engine's own are read when they are first needed, if ever."""
        model = self.context.model
        self._tokenizer = load_tokenizer(model.tokenizer_path, trust_remote_code=model.trust_remote_code)
        self._end_ids = end_of_sequence_ids(model.path, self._tokenizer)

    def attach(self, module: nn.Module) -> None:
        """Generate with this module from now on; weights of the engine's own are let go.

        Raises:
            UserError: for a model that has more than attention layers.
            RunError: while requests are under way.
        """
        if self._task is not None:
            raise RunError("a module cannot be attached while requests are under way", where="rollout")
        check_supported(module)
        self._module, self._attached = module, True
        self._decoder = self._unusable = None

    def load_weights(self, stream: WeightStream, version: int) -> None:
        """Replace the weights of the engine's own model, at a token boundary.

        After an error the engine refuses to generate until a load succeeds, because weights are copied as they come.

        Raises:
            WeightStreamError: for a tensor that is missing, unknown, sent twice, a shard, or of the wrong shape.
            RunError: when the trainer's module is attached, which has its weights already.
        """
        if self._attached:
            raise RunError("the trainer's module is attached to rollout 'hf'; there is nothing to load")
        module = self._own_or_attached()
        self._unusable = f"the load of weights of version {version} did not succeed"
        receive(module, stream)
        self._unusable = None
        self.weight_version = version

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Completion]:
        """Yield the request's samples as they finish; an error in decoding is raised by every request under way.

        Raises:
            UserError: for a request that the model cannot serve.
            RunError: after a load of weights that failed.
        """
        job = self._submit(request)
        try:
            for _ in request.seeds:
                result = await job.results.get()
                if isinstance(result, Exception):
                    raise result
                yield result
        finally:
            self._end(job)

    async def abort(self, request_id: str) -> None:
        """End a request, with what it has; one that is not under way is left alone."""
        job = self._jobs.get(request_id)
        if job is not None:
            for row in self._end(job):
                job.deliver(row)

    async def pause(self) -> None:
        """Stop drawing tokens; on return no forward call is under way and the module is in its former mode."""
        self._paused = True
        while self._paused and self._decoding:
            await asyncio.sleep(0)

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self._paused = False
        self._resumed.set()

    def close(self) -> None:
        """Let go of the model."""
        if self._task is not None:
            self._task.cancel()
        self._module = self._decoder = None

    # -- requests --------------------------------------------------------------------------------------------------

    def _submit(self, request: GenerationRequest) -> _Job:
        """Queue a request's samples, and see to it that something decodes them."""
        if self._unusable:
            raise RunError(f"rollout 'hf' has no usable weights: {self._unusable}", mend="load weights again")
        module = self._own_or_attached()
        if self._task is None:
            self._jobs, self._waiting, self._resumed = {}, deque(), asyncio.Event()
            self._task = asyncio.get_running_loop().create_task(self._decode())
        if request.request_id in self._jobs:
            raise UserError(f"a request {request.request_id!r} is under way already", where="rollout")
        self._check(request, module)
        sampling = request.sampling
        ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._end_ids)
        vocabulary = text_config(module).vocab_size
        job = _Job(request.request_id)
        job.rows = [
            Row(
                owner=job, sample=sample, prompt=tuple(request.prompt_token_ids), seed=seed, sampling=sampling,
                stop_ids=frozenset(token for token in ids if 0 <= token < vocabulary),
                stop_strings=StopStrings(self._tokenizer, sampling.stop) if sampling.stop else None,
            )
            for sample, seed in enumerate(request.seeds)
        ]  # fmt: skip
        self._jobs[request.request_id] = job
        self._waiting.extend(job.rows)
        return job

    def _check(self, request: GenerationRequest, module: nn.Module) -> None:
        """Refuse what would fail in the middle of other requests."""
        config, prompt, sampling = text_config(module), request.prompt_token_ids, request.sampling
        limit = getattr(config, "max_position_embeddings", None)
        if not prompt:
            raise UserError(f"the prompt of request {request.request_id!r} is empty", where="rollout")
        if min(prompt) < 0 or max(prompt) >= config.vocab_size:
            raise UserError(f"a prompt has tokens {min(prompt)} to {max(prompt)}; the model has 0 to "
                            f"{config.vocab_size - 1}", where="rollout", mend="give model and tokenizer of one "
                            "kind")  # fmt: skip
        if sampling.max_tokens < 1:
            raise UserError(f"max_tokens is {sampling.max_tokens}; it must be 1 or more", where="rollout")
        if limit is not None and len(prompt) + sampling.max_tokens > limit:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and a response of up to {sampling.max_tokens} exceed the model's "
                f"{limit} positions", where="rollout.max_response_tokens",
                mend=f"allow prompts of at most {limit - sampling.max_tokens} tokens, or shorter responses",
            )  # fmt: skip
        if sampling.stop and self._tokenizer is None:
            raise UserError(f"stop strings need a tokenizer, and {self.context.model.tokenizer_path} has none",
                            where="rollout.stop")  # fmt: skip

    def _end(self, job: _Job) -> list[Row]:
        """Take a job out; returns its rows that had not ended."""
        if self._jobs.get(job.request_id) is not job:
            return []
        del self._jobs[job.request_id]
        ended = [row for row in job.rows if row.finish_reason is None]
        for row in ended:
            row.finish_reason = "abort"
        if ended:
            self._waiting = deque(row for row in self._waiting if row.owner is not job)
        return ended

    # -- decoding --------------------------------------------------------------------------------------------------

    async def _decode(self) -> None:
        module = self._own_or_attached()
        if self._decoder is None:
            self._decoder = Decoder(module, lambda: self.weight_version)
        decoder = self._decoder
        try:
            while self._waiting or decoder.rows:
                if self._paused:
                    self._resumed.clear()
                    await self._resumed.wait()
                with evaluation_mode(module):
                    self._decoding = True
                    while not self._paused and (self._waiting or decoder.rows):
                        for row in self._advance(decoder):
                            cast(_Job, row.owner).deliver(row)
                        await asyncio.sleep(0)
                self._decoding = False
        except BaseException as error:
            told = error if isinstance(error, Exception) else RunError("generation was stopped", where="rollout")
            for job in self._jobs.values():
                job.results.put_nowait(told)
            if told is not error:
                raise
        finally:
            decoder.clear()
            self._decoding, self._task = False, None

    def _advance(self, decoder: Decoder) -> Iterable[Row]:
        """One forward call: take rows in if enough of them fit, else draw a token for all; yields rows that ended."""
        decoder.drop_finished()
        room, waiting = self._most_rows - len(decoder.rows), len(self._waiting)
        if waiting and (not decoder.rows or room >= min(waiting, max(1, self._most_rows // 8))):
            return decoder.admit([self._waiting.popleft() for _ in range(min(room, waiting))])
        return decoder.step()

    def _own_or_attached(self) -> nn.Module:
        """The attached module, or the engine's own, read at the first call."""
        if self._module is None:
            module: Any = load_own(self.context)
            check_supported(module)
            self._module = module
        return self._module
