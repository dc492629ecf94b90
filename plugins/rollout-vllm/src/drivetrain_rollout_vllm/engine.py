"""The rollout ``vllm``: requests come in as they like, one task takes vLLM's steps."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

from drivetrain import (
    Completion,
    GenerationRequest,
    RankLayout,
    RolloutContext,
    RolloutEngine,
    RunError,
    UserError,
    WeightStreamError,
    end_of_sequence_ids,
)
from drivetrain.weights import Manifest, WeightStream
from drivetrain_rollout_vllm.config import VLLMRolloutConfig
from drivetrain_rollout_vllm.launch import compilation, start

PARTS = frozenset({"weights", "kv_cache"})


@dataclass(eq=False)
class _Sample:
    """A sample under way."""

    index: int
    versions: list[tuple[int, int]]
    done: bool = False


@dataclass(eq=False)
class _Job:
    """A request under way: its samples by vLLM's request, and where its completions or its error go."""

    request_id: str
    samples: dict[str, _Sample] = field(default_factory=dict)
    results: asyncio.Queue[Completion | Exception] = field(default_factory=asyncio.Queue)

    def deliver(self, key: str, output: Any) -> None:
        sample = self.samples[key]
        sample.done = True
        self.results.put_nowait(
            Completion(
                request_id=self.request_id, sample=sample.index, token_ids=tuple(output.token_ids),
                log_probs=tuple(output.logprobs.logprobs) if output.token_ids else (),
                finish_reason=output.finish_reason, weight_versions=tuple(sample.versions),
            )
        )  # fmt: skip


class VLLMRollout(RolloutEngine):
    """An engine of vLLM's in this process, or one rank of an engine that is split over several.

    Every sample is a request of vLLM's; the prompt that samples share is read once, by its prefix cache. Keys and
    values of requests under way are computed anew when weights change; a completion's ``weight_versions`` say which
    token is from which.
    """

    config: VLLMRolloutConfig

    def __init__(self, config: VLLMRolloutConfig, context: RolloutContext) -> None:
        super().__init__(config, context)
        self._engine: Any = None
        self._asleep: set[str] = set()
        self._with_adapter: dict[str, Any] = {}  # of every request
        self._unusable: str | None = "it waits for its first weights" if context.receives_weights else None
        self._adapter: TemporaryDirectory[str] | None = None  # where vLLM reads the adapter from
        self._jobs: dict[str, _Job] = {}
        self._owners: dict[str, _Job] = {}  # by vLLM's request
        self._task: asyncio.Task[None] | None = None
        self._paused = False
        self._resumed = asyncio.Event()

    @property
    def layout(self) -> RankLayout:
        size = self.config.tensor_parallel_size
        return RankLayout(dp=self.context.rank // size, dp_size=self.context.world_size // size,
                          tp=self.context.rank % size, tp_size=size)  # fmt: skip

    def initialize(self) -> None:
        """Start vLLM: read the weights, or none if they will be sent; take memory for keys and values; capture graphs.

        Raises:
            UserError: vLLM is not installed, or refuses the settings.
        """
        model, size = self.context.model, self.config.tensor_parallel_size
        if self.context.world_size % size:
            raise UserError(f"{self.context.world_size} processes do not divide into engines of {size}",
                            where="rollout.tensor_parallel_size")  # fmt: skip
        self._owns_process_group = not dist.is_initialized()
        self._engine = start(self.config, self.context)
        self._longest = int(self._engine.model_config.max_model_len)
        self._vocabulary = int(self._engine.model_config.get_vocab_size())
        tokenizer = self._engine.tokenizer
        self._end_ids = {token for token in end_of_sequence_ids(model.path, tokenizer) if token < self._vocabulary}

    # -- weights ---------------------------------------------------------------------------------------------------

    @cached_property
    def _manifest(self) -> dict[str, Any]:
        from drivetrain_rollout_vllm.receiving import manifest_of

        return manifest_of(self.context.model).expected

    def load_weights(self, stream: WeightStream, version: int) -> None:
        """Replace all weights, or with ``adapter_rank`` the adapter, at a token boundary, and forget cached prefixes.

        After an error the engine refuses to generate until a load succeeds, because weights are taken in as they come.

        Raises:
            WeightStreamError: for a tensor that is missing, unknown, sent twice, a shard, or of the wrong shape.
        """
        self._unusable = f"the load of weights of version {version} did not succeed"
        if self.config.adapter_rank is None:
            self._take_weights(stream)
        else:
            self._take_adapter(stream, self.config.adapter_rank)
        for key, job in self._owners.items():
            job.samples[key].versions.append((self._state(key).detokenizer.num_output_tokens(), version))
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RunError("vLLM could not forget what it had cached of the former weights", where="rollout vllm")
        self._unusable = None
        self.weight_version = version

    def _take_weights(self, stream: WeightStream) -> None:
        """Hand buckets to vLLM as they come."""
        from drivetrain_rollout_vllm.receiving import accepted

        worker = self._engine.model_executor.driver_worker.worker
        manifest = Manifest(self._manifest)
        worker.start_weight_update()
        try:
            for bucket in stream:
                entries = accepted(bucket, manifest)
                worker.update_weights({"tensors": [(entry.name, entry.tensor) for entry in entries]})
            manifest.complete()
        finally:
            if worker._weight_update_active:
                worker.finish_weight_update()

    def _take_adapter(self, stream: WeightStream, rank: int) -> None:
        """Have vLLM read an adapter in place of the one that it has."""
        from drivetrain_rollout_vllm import adapters

        tensors = adapters.received(stream, rank)
        if self._adapter is None:
            self._adapter = TemporaryDirectory(prefix="drivetrain-adapter-")
        folder = Path(self._adapter.name)
        adapters.write(tensors, rank, folder)
        try:
            taken = self._engine.add_lora(adapters.request(folder, load=True))
        except Exception as error:  # of types that depend on vLLM's version
            raise WeightStreamError(f"vLLM refuses the adapter: {error}") from error
        if not taken:
            raise WeightStreamError("vLLM did not take the adapter")
        self._with_adapter = {"lora_request": adapters.request(folder)}

    def sleep(self, parts: Collection[str] = ("weights", "kv_cache")) -> None:
        """Free the device memory of weights and of keys and values: after it both sleep.

        With ``sleep_level`` 0 it stays awake. vLLM's CPU build keeps the memory, and does not generate all the same.

        Raises:
            RunError: requests are under way, or one part is to sleep while the other is awake.
        """
        if not self.config.sleep_level or self._asleep == PARTS:
            return
        if self._asleep.union(parts) != PARTS:
            raise RunError(f"vLLM sleeps with {' and '.join(sorted(PARTS))} together", where="rollout vllm")
        if self._jobs:
            raise RunError(f"{len(self._jobs)} requests are under way, first {next(iter(self._jobs))!r}",
                           where="rollout vllm", mend="wait for them, or abort them")  # fmt: skip
        self.wake()  # of one that sleeps in part, vLLM would take no notice
        self._engine.reset_prefix_cache()
        self._engine.sleep(level=self.config.sleep_level)
        self._asleep = set(PARTS)
        if self.config.sleep_level == 2:
            self._unusable = self._unusable or "its weights were dropped when it went to sleep"

    def wake(self, parts: Collection[str] = ("weights", "kv_cache")) -> None:
        """Take the device memory of the parts back; parts that are awake stay so."""
        if waking := self._asleep.intersection(parts):
            self._engine.wake_up(tags=sorted(waking))
            self._asleep -= waking

    # -- requests --------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Completion]:
        """Yield the request's samples as they finish; an error of vLLM's is raised by every request under way.

        Raises:
            UserError: for a request that the model cannot serve.
            RunError: while it sleeps, after a load of weights that failed, and if vLLM fails.
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
        if (job := self._jobs.get(request_id)) is not None:
            self._end(job, deliver=True)

    async def pause(self) -> None:
        """Take no further step."""
        self._paused = True

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self._paused = False
        self._resumed.set()

    def _submit(self, request: GenerationRequest) -> _Job:
        """Hand a request's samples to vLLM, and see to it that something takes its steps."""
        if self._unusable or self._asleep:
            raise RunError(f"rollout 'vllm' cannot generate: {self._unusable or 'it sleeps'}",
                           mend="load weights, and wake it")  # fmt: skip
        if self._task is None:
            self._resumed = asyncio.Event()
            self._task = asyncio.get_running_loop().create_task(self._run())
        if request.request_id in self._jobs:
            raise UserError(f"a request {request.request_id!r} is under way already", where="rollout")
        self._check(request)
        job = self._jobs[request.request_id] = _Job(request.request_id)
        for index, seed in enumerate(request.seeds):
            key = f"{request.request_id}#{index}"
            try:
                self._engine.add_request(key, {"prompt_token_ids": list(request.prompt_token_ids)},
                                         self._sampling(request, seed), **self._with_adapter)  # fmt: skip
            except Exception as error:  # of types that depend on vLLM's version
                self._end(job)
                raise UserError(f"vLLM refuses request {request.request_id!r}: {error}", where="rollout") from error
            job.samples[key] = _Sample(index, [(0, self.weight_version)])
            self._owners[key] = job
        return job

    def _sampling(self, request: GenerationRequest, seed: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        wanted = request.sampling
        ends = set(wanted.stop_token_ids) | (set() if wanted.ignore_eos else self._end_ids)
        return SamplingParams(
            temperature=wanted.temperature, top_k=wanted.top_k, top_p=wanted.top_p, min_p=wanted.min_p,
            max_tokens=wanted.max_tokens, seed=self._seed(seed),
            min_tokens=max(wanted.min_tokens - 1, 0),  # vLLM does not count the token that ends a response
            stop=list(wanted.stop), stop_token_ids=sorted(ends), ignore_eos=True,  # the tokens that end are given
            logprobs=0, flat_logprobs=True, detokenize=bool(wanted.stop), skip_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip

    def _seed(self, seed: int) -> int | None:
        return seed % 2**63 if self.config.sample_seeds else None

    def _check(self, request: GenerationRequest) -> None:
        """Refuse what vLLM would cut short, or fail with in the middle of other requests."""
        prompt, sampling = request.prompt_token_ids, request.sampling
        if not prompt:
            raise UserError(f"the prompt of request {request.request_id!r} is empty", where="rollout")
        if min(prompt) < 0 or max(prompt) >= self._vocabulary:
            raise UserError(f"the prompt of request {request.request_id!r} has tokens {min(prompt)} to {max(prompt)}; "
                            f"the model has 0 to {self._vocabulary - 1}", where="rollout",
                            mend="give model and tokenizer of one kind")  # fmt: skip
        if len(prompt) + sampling.max_tokens > self._longest:
            raise UserError(
                f"request {request.request_id!r}: a prompt of {len(prompt)} tokens and a response of up to "
                f"{sampling.max_tokens} exceed the engine's {self._longest} positions",
                where="rollout.max_response_tokens",
                mend=f"allow prompts of at most {self._longest - sampling.max_tokens} tokens, shorter responses, or "
                     "more rollout.max_model_tokens",
            )  # fmt: skip
        if sampling.stop and self._engine.tokenizer is None:
            raise UserError(f"stop strings need a tokenizer, and {self.context.model.tokenizer_path} has none",
                            where="rollout.stop")  # fmt: skip

    def _end(self, job: _Job, *, deliver: bool = False) -> None:
        """Take a job out, and end those of its samples that have not ended."""
        if self._jobs.get(job.request_id) is not job:
            return
        del self._jobs[job.request_id]
        under_way = [key for key, sample in job.samples.items() if not sample.done]
        for key in under_way:
            del self._owners[key]
            if deliver:
                from vllm.v1.engine import FinishReason

                ended = self._state(key).make_request_output(
                    new_token_ids=[], pooling_output=None, finish_reason=FinishReason.ABORT, stop_reason=None
                )
                job.deliver(key, ended.outputs[0])
        if under_way:
            self._engine.abort_request(under_way)

    def _state(self, key: str) -> Any:
        """What vLLM holds of a request under way, which it keeps under a name of its own."""
        processor = self._engine.output_processor
        (internal,) = processor.external_req_ids[key]
        return processor.request_states[internal]

    # -- steps -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        engine = self._engine
        try:
            while engine.has_unfinished_requests():
                if self._paused:
                    self._resumed.clear()
                    await self._resumed.wait()
                with compilation(self.config, self.context):
                    outputs = engine.step()
                for output in outputs:
                    if output.finished and (job := self._owners.pop(output.request_id, None)) is not None:
                        job.deliver(output.request_id, output.outputs[0])
                await asyncio.sleep(0)
        except BaseException as error:
            told = self._failure(error)
            for job in self._jobs.values():
                job.results.put_nowait(told)
            if not isinstance(error, Exception):
                raise
        finally:
            self._task = None

    def _failure(self, error: BaseException) -> RunError:
        """What every request under way is told, which none of them outlives."""
        names = sorted(self._jobs)
        what = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        if isinstance(error, Exception):
            self._unusable = f"vLLM failed: {type(error).__name__}: {error}"
            told = RunError(f"vLLM failed at requests {what}: {type(error).__name__}: {error}", where="rollout vllm")
        else:
            told = RunError(f"generation was stopped at requests {what}", where="rollout vllm")
            self._engine.abort_request(list(self._owners))
            self._owners.clear()
        told.__cause__ = error
        return told

    def close(self) -> None:
        """Let go of the engine, its memory and, if it made one, torch's process group."""
        if self._engine is None:
            return
        if self._task is not None:
            self._task.cancel()
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        client = self._engine.engine_core
        core = client.engine_core  # its own shutdown, now or when it is collected, ends the workers' process group
        if (finalizer := getattr(client, "_finalizer", None)) is not None:
            finalizer.detach()
        core.structured_output_manager.clear_backend()
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        gc.unfreeze()
        self._engine = None
        if self._adapter is not None:
            self._adapter.cleanup()
        destroy_model_parallel()
        if self._owns_process_group:
            destroy_distributed_environment()
