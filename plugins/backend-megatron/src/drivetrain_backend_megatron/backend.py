"""The backend ``megatron``."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from drivetrain import PluginError, RankLayout, RunError, TrainingBackend, UserError
from drivetrain.metrics import Metric, merge_metrics
from drivetrain.numerics import LossInputs
from drivetrain.protocol import units
from drivetrain.weights import WeightStream, lend
from drivetrain_backend_common import copies
from drivetrain_backend_common.host_memory import Shelves
from drivetrain_backend_common.log_probs import token_log_probs
from drivetrain_backend_common.logit_kernels import logit_kernel
from drivetrain_backend_common.objective import Columns, Objective
from drivetrain_backend_common.rows import Tokens, micro_batches
from drivetrain_backend_common.steps import not_finite, step_metrics
from drivetrain_backend_megatron import (
    build,
    cpu,
    families,
    folders,
    gradients,
    head,
    offload,
    parallel,
    pipeline,
    state,
    weights,
)
from drivetrain_backend_megatron.optimizer import Optimizer
from drivetrain_backend_megatron.packing import PackedParams
from drivetrain_backend_megatron.sequences import Sequences, last_tokens

if TYPE_CHECKING:
    from drivetrain import DataProto, LossTerm
    from drivetrain.numerics import Counts
    from drivetrain_backend_megatron.config import MegatronConfig

Consumer = Callable[[int, dict[str, Tensor]], Tensor]
"""Takes the number of a micro-batch and the outputs of its wanted tokens, ``(wanted,)``; gives a share of a loss."""


class MegatronBackend(TrainingBackend):
    """A causal language model of megatron-core and its optimizer, over ranks of tensor, pipeline, context, expert and
    data parallelism; for the role ``critic``, its trunk with a value head; for the role ``reward``, a sequence
    classifier."""

    config: MegatronConfig

    def initialize(self) -> None:
        context, config = self.context, self.config
        self.outputs = {"critic": ("values",), "reward": ("scores",)}.get(context.role, ("log_probs", "entropy"))
        self.device = context.hardware.device()
        self.log_prob_kernel = logit_kernel(config.log_prob_kernel, self.device)
        dtype = getattr(torch, context.model.dtype)
        self.hf_config = folders.read_config(context)
        entries = self.hf_config.to_dict()
        kind = families.family(entries)
        shape = families.Shape.of(entries, **folders.labels(self.hf_config, context.role))
        self.labels = shape.labels
        self.vocab_size = shape.vocab
        self.version = 0
        self.skipped = 0  # updates in a row
        self._copies = copies.Copies()
        with self._engine():
            parallel.initialize(config, communication_backend=context.hardware.communication_backend,
                                seed=context.seed)  # fmt: skip
            options = build.transformer_config(config, kind, shape, entries, dtype=dtype, device=self.device,
                                               learns=context.optimizer is not None)  # fmt: skip
            self.pieces = build.build(options, shape, self.hf_config, self.device)
            table = families.parameters(kind, shape)
            drawn = folders.value_head(context, self.hf_config, families.head(table))
            with folders.weights_of(context, self.hf_config, drawn) as folder:
                weights.load(self.pieces, table, folder, where=f"{folders.section(context)}.path", drawn=drawn)
            weights.mark_shares(self.pieces, table)
            self.last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            if self.last and not shape.labels:
                head.detach(self.pieces[-1])
            self.vocabulary = head.TensorRanks(shape.vocab)
            self.optimizer: Optimizer | None = None
            if context.optimizer is None:
                for piece in self.pieces:
                    piece.requires_grad_(False)
            else:
                shared = config.use_distributed_optimizer
                self.learning = gradients.wrapped(
                    self.pieces, distributed_optimizer=shared, overlap_reduce=config.overlap_grad_reduce,
                    overlap_gather=config.overlap_param_gather, bucket_size=config.ddp_bucket_size,
                )  # fmt: skip
                self.optimizer = Optimizer(self.learning, context.optimizer, distributed=shared,
                                           frees_gradients=config.grad_offload)  # fmt: skip
            self.gatherer = weights.Gatherer(self.pieces, table)
        chosen = {"parameters": config.param_offload, "optimizer": config.optimizer_offload}
        self.offloads = frozenset(part for part, moves in chosen.items() if moves)
        self._shelves = Shelves("megatron", context, offload.PARTS, self._part)

    @property
    def layout(self) -> RankLayout:
        return parallel.layout()

    def _engine(self) -> AbstractContextManager[None]:
        """Around whatever calls megatron-core."""
        return cpu.stand_in() if self.device.type == "cpu" else nullcontext()

    def _have_parameters(self) -> None:
        """Raise RunError if the parameters are in host memory; have what other ranks updated of them."""
        self._shelves.need("parameters")
        if self.optimizer is not None:
            with self._engine():
                self.optimizer.gather()

    # -- computing --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, batch: DataProto, outputs: Collection[str], *, temperature: float) -> dict[str, Tensor]:
        if unknown := set(outputs) - set(self.outputs):
            raise PluginError(f"backend megatron does not compute {sorted(unknown)} for the role {self.context.role}")
        self._have_parameters()
        ids, attention_mask = batch.batch["input_ids"], batch.batch["attention_mask"]
        texts = self.context.role == "reward"
        if texts:
            pad = getattr(self.hf_config, "pad_token_id", None)
            tokens = last_tokens(ids, attention_mask, pad=pad, vocab_size=self.vocab_size)
            shape: tuple[int, ...] = (len(ids), self.labels)
        else:
            shape = tuple(batch.batch["responses"].shape)
            tokens = Tokens.of(ids, attention_mask, attention_mask[:, ids.shape[1] - shape[1] :],
                               vocab_size=self.vocab_size)  # fmt: skip
        plan = self._even(self._plan(tokens))
        sequences = [Sequences.of(tokens, rows) for rows in plan]
        result = {name: torch.zeros(shape, device=self.device) for name in outputs}

        def keep(number: int, computed: dict[str, Tensor]) -> Tensor:
            packed = sequences[number]
            if len(packed.row):
                rows = torch.tensor(plan[number])[packed.row]
                where = (rows,) if texts else (rows, packed.column)  # a text has all its scores at one token
                for name in result:
                    result[name][where] = computed[name]
            return torch.zeros((), device=self.device)

        self._run(self.pieces, sequences, outputs, temperature, keep, forward_only=True)
        if self.layout.pp_size > 1:  # the last stage has them
            group = parallel_state.get_pipeline_model_parallel_group()
            for name in sorted(result):
                dist.broadcast(result[name], parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        return result

    def update(
        self, batch: DataProto, terms: Sequence[LossTerm], counts: Counts, *, temperature: float, lr_factor: float
    ) -> dict[str, Metric]:
        """As the contract says; metrics of the terms are on the last pipeline stage alone."""
        if self.optimizer is None:
            raise RunError(f"the model of role {self.context.role!r} has no optimizer, so it cannot be updated")
        self._shelves.need(*offload.PARTS)
        objective = Objective.of(terms, self.outputs)
        mask = batch.batch["response_mask"]
        tokens = Tokens.of(batch.batch["input_ids"], batch.batch["attention_mask"], mask, vocab_size=self.vocab_size)
        plan = self._plan(tokens, objective.joins(batch))
        objective.check(len(plan), self.layout.dp_size)
        plan = self._even(plan)
        sequences = [Sequences.of(tokens, rows) for rows in plan]
        columns = Columns(batch, self.device)
        total = torch.zeros((), device=self.device)
        parts: list[dict[str, Metric]] = []

        def share(number: int, computed: dict[str, Tensor]) -> Tensor:
            nothing = 0 * computed[objective.outputs[0]].sum()  # so that all ranks have a backward pass
            rows, packed = plan[number], sequences[number]
            if not rows:
                return nothing
            zeros, where = torch.zeros(len(rows), mask.shape[1], device=self.device), (packed.row, packed.column)
            inputs = {name: zeros.index_put(where, computed[name]) for name in objective.outputs}
            loss, metrics = objective(LossInputs(**inputs), columns.of(rows), counts)
            parts.append(metrics)
            total.add_(loss.detach())
            return loss if loss.requires_grad else loss + nothing

        balance = get_model_config(self.pieces[0]).balance
        if balance is not None:
            balance.begin(self._over_copies(sum(sum(of.lengths) for of in sequences if len(of.row))))
        with self._engine():
            self.optimizer.begin()
        self._run(self.learning, sequences, objective.outputs, temperature, share, forward_only=False)
        skipped = self.skipped
        routed = {} if balance is None else balance.end()
        metrics = routed | self._step(self.optimizer, total, lr_factor)
        return metrics if self.skipped > skipped else merge_metrics(parts) | metrics

    def _run(
        self, pieces: Sequence[Any], sequences: Sequence[Sequences], outputs: Collection[str], temperature: float,
        consume: Consumer, *, forward_only: bool,
    ) -> None:  # fmt: skip
        """Run micro-batches, and give the last stage's consumer their outputs, one micro-batch after the other."""
        if not temperature > 0:
            raise UserError(f"log-probabilities at temperature {temperature} are undefined", where="temperature")
        cp, rank = self.layout.cp_size, self.layout.cp
        ranks = self.vocabulary if self.vocabulary.size > 1 else None

        def loss(hidden: Tensor, packed: PackedParams, number: int) -> Tensor:
            of = sequences[number]
            own, place = (places.to(self.device) for places in of.predictors(packed, cp=cp, rank=rank))
            predictors = hidden[0].index_select(0, place)
            if self.labels:
                scores = self.pieces[-1].output_layer.of(predictors)
                computed = {name: scores if name == "scores" else scores[:, 0] for name in self.outputs}
            else:
                output = self.vocabulary.head(self.pieces[-1])
                log_probs, entropies = token_log_probs(
                    predictors, of.target.to(self.device)[own], output, temperature=temperature,
                    chunk_tokens=self.config.log_prob_chunk_tokens, entropy="entropy" in outputs,
                    kernel=self.log_prob_kernel, ranks=ranks,
                )  # fmt: skip
                computed = {"log_probs": log_probs} | ({} if entropies is None else {"entropy": entropies})
            for name, values in computed.items():
                zeros = torch.zeros(len(of.target), *values.shape[1:], device=self.device)
                computed[name] = head.over_context_ranks(zeros.index_put((own,), values))
            return consume(number, computed)

        with self._engine():
            batches = [(of.ids, of.lengths) for of in sequences]
            fillers = {number for number, of in enumerate(sequences) if not len(of.row)}
            pipeline.run(pieces, batches, loss, forward_only=forward_only, fillers=fillers)

    def _over_copies(self, number: int) -> int:
        """The sum over the ranks of data parallelism."""
        total = torch.tensor(number, device=self.device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return int(total)

    def _plan(self, tokens: Tokens, joins: Sequence[Sequence[Any]] = ()) -> list[list[int]]:
        """Rows of each micro-batch."""
        budget = self.config.micro_batch_tokens or (2048 if self.device.type == "cpu" else 16384)
        return micro_batches(tokens.lengths, units(len(tokens.lengths), joins), budget)

    def _even(self, plan: list[list[int]]) -> list[list[int]]:
        """The plan, with empty micro-batches up to as many as the busiest rank has, and as interleaved stages need."""
        count = torch.tensor(max(len(plan), 1), device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        multiple = self.layout.pp_size if self.config.virtual_pipeline_model_parallel_size else 1
        return plan + [[]] * (-(-int(count) // multiple) * multiple - len(plan))

    def _step(self, optimizer: Optimizer, total: Tensor, lr_factor: float) -> dict[str, Metric]:
        """Clip the gradients and take the step, or take none if something is not finite; all ranks decide alike."""
        where, allowed = self.layout, self.config.max_skipped_steps
        with self._engine():
            norm = optimizer.gradient_norm()
        once = self.last and where.tp == where.cp == 0  # ranks that share rows have the same loss
        sums = torch.stack([total if once else torch.zeros_like(total), torch.zeros_like(total)])
        sums[1] = float(not math.isfinite(norm))
        dist.all_reduce(sums)
        loss = float(sums[0])
        finite = math.isfinite(loss) and not sums[1]
        if not finite and self.skipped == allowed:
            with self._engine():
                optimizer.end()
            raise not_finite(self.context.role, loss, norm, allowed=allowed)
        self.skipped = 0 if finite else self.skipped + 1
        with self._engine():
            if finite:
                optimizer.step(lr_factor=lr_factor, norm=norm, max_norm=self.context.max_grad_norm)
                self.version += 1
            optimizer.end()
        return step_metrics(optimizer.lr * lr_factor, loss, norm, finite=finite, allowed=allowed, counts=where.dp == 0)

    # -- state and weights ------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        self._state(copies.as_it_is)(folder)

    def snapshot(self) -> Callable[[Path], None]:
        write = self._state(self._copies)
        self.context.hardware.synchronize()
        return write

    def _state(self, copy: copies.Copy) -> Callable[[Path], None]:
        self._shelves.need(*offload.PARTS)
        self._have_parameters()
        rng = self.context.hardware.rng_state()
        return state.collect(weights.held(self.pieces), self.gatherer.table, self.optimizer, rng,
                             rank=self.context.rank, layout=self.layout, copy=copy)  # fmt: skip

    def load(self, folder: Path) -> None:
        """As the contract says; ranks may have other sizes than those that wrote, and then draw new random numbers."""
        self._shelves.need(*offload.PARTS)
        state.load(folder, weights.held(self.pieces), self.gatherer.table, self.optimizer,
                   self.context.hardware.set_rng_state, rank=self.context.rank, layout=self.layout)  # fmt: skip

    def export(self, folder: Path) -> None:
        self._have_parameters()
        folders.export(self.gatherer.entries(), self.hf_config, self.context, folder)

    def weights(self, *, bucket_bytes: int, sharded: bool = False) -> AbstractContextManager[WeightStream]:
        if sharded:
            raise PluginError("backend megatron does not lend shards")
        self._have_parameters()
        return lend(self.gatherer.entries(), bucket_bytes=bucket_bytes, version=self.version)

    def offload(self, parts: Collection[str]) -> None:
        """Move ``parameters``, or what the ``optimizer`` holds of each, to pinned host memory.

        Until they are back, whatever needs them raises RunError.
        """
        if "parameters" in parts and not self._shelves.away("parameters"):
            self._have_parameters()
        self._shelves.put(parts)

    def onload(self, parts: Collection[str]) -> None:
        self._shelves.take(parts)

    def memory(self) -> dict[str, int]:
        """Bytes on the device by part."""
        buffers = gradients.storages(self.learning) if self.optimizer is not None else []
        return self._shelves.memory() | {"gradients": sum(storage.nbytes() for storage in buffers)}

    def _part(self, name: str) -> list[Tensor]:
        return offload.part(name, weights.held(self.pieces), self.optimizer)

    def close(self) -> None:
        self.optimizer = None
        self.pieces = []
        self.learning = []
        del self.gatherer
        parallel.release()
        self.context.hardware.empty_cache()
