"""The backend ``fsdp``."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from drivetrain import PluginError, RankLayout, RunError, TrainingBackend, UserError, resolve
from drivetrain.metrics import Metric, merge_metrics
from drivetrain.numerics import LossInputs
from drivetrain.protocol import units
from drivetrain.weights import WeightStream, lend
from drivetrain_backend_common import copies
from drivetrain_backend_common.attention_kernels import KERNELS
from drivetrain_backend_common.host_memory import Shelves
from drivetrain_backend_common.log_probs import Head, token_log_probs
from drivetrain_backend_common.logit_kernels import logit_kernel
from drivetrain_backend_common.objective import Columns, Objective
from drivetrain_backend_common.rows import Tokens, micro_batches
from drivetrain_backend_common.steps import not_finite, step_metrics
from drivetrain_backend_fsdp import classifier, gradients, loading, lora, names, offload, sharding, state, ulysses
from drivetrain_backend_fsdp import model as models
from drivetrain_backend_fsdp.checkpointing import recompute
from drivetrain_backend_fsdp.compiling import compile_layers
from drivetrain_backend_fsdp.critic import values_of
from drivetrain_backend_fsdp.packing import Packed, filler, pack

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from drivetrain import DataProto, LossTerm
    from drivetrain.numerics import Counts
    from drivetrain_backend_fsdp.config import FSDPConfig


class FSDPBackend(TrainingBackend):
    """A causal language model of transformers and its optimizer; for the role ``critic``, its trunk with a value head;
    for the role ``reward``, a sequence classifier.

    With one process the model is not wrapped: sharding over one rank would only copy. With several, each decoder layer
    is sharded over all of them, or over groups of them that have a copy each.
    """

    config: FSDPConfig

    def initialize(self) -> None:
        context = self.context
        self.device = context.hardware.device()
        self.log_prob_kernel = logit_kernel(self.config.log_prob_kernel, self.device)
        self.outputs = {"critic": ("values",), "reward": ("scores",)}.get(context.role, ("log_probs", "entropy"))
        judges, config = context.role == "reward", self.config
        if config.cpu_offload and context.world_size == 1:
            raise UserError("one process shards nothing", where="backend.cpu_offload",
                            mend="set param_offload and optimizer_offload, or run in several processes")  # fmt: skip
        kernel, dtype = KERNELS[config.attention], self._compute_dtype or getattr(torch, context.model.dtype)
        kernel.check(self.device, dtype, learns=context.optimizer is not None)
        self.ranks = ulysses.join(context, config.sequence_parallel, self.device)
        model = classifier.load(context) if judges else models.load(context, kernel)
        layers = models.decoder_layers(model)
        if config.lora is not None and context.optimizer is not None:
            lora.attach(model, layers, config.lora, role=context.role, seed=context.seed)
        if config.compile:
            compile_layers(layers, self.device)
        if config.gradient_checkpointing:
            recompute(layers, selective=config.gradient_checkpointing == "selective")
        if config.activation_offload:
            offload.spill(layers, pinned=self.device.type != "cpu")
        if context.world_size > 1:
            sharding.shard(
                model, layers, device_type=self.device.type, world_size=context.world_size,
                shard_size=config.shard_size, reshard_after_forward=config.reshard_after_forward,
                compute_dtype=self._compute_dtype, on_host=config.cpu_offload,
            )  # fmt: skip
            loading.fill(model, self.device, on_host=config.cpu_offload)
        elif config.shard_size not in (None, 1):
            raise UserError(f"one process cannot shard over {config.shard_size}", where="backend.shard_size",
                            mend="remove it, or start more processes")  # fmt: skip
        self.model: PreTrainedModel = model if config.cpu_offload else cast(Any, model).to(self.device)
        self.vocab_size = len(cast(nn.Embedding, model.get_input_embeddings()).weight)
        self.version = 0
        self.skipped = 0  # updates in a row
        self._copies = copies.Copies()
        if not judges:
            with self._autocast() if kernel.half else nullcontext():  # float32 weights show more in float32
                models.verify(self.model, self.device, self.ranks)
        sharding.release(self.model)
        self.optimizer: torch.optim.Optimizer | None = None
        if context.optimizer is None:
            self.model.requires_grad_(False)
        else:
            make = resolve("optimizers", context.optimizer.name)
            learns = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
            self.optimizer = make(learns, context.optimizer)
            for group in self.optimizer.param_groups:
                group["initial_lr"] = group["lr"]
        chosen = {"parameters": config.param_offload, "optimizer": config.optimizer_offload}
        self.offloads = frozenset(part for part, moves in chosen.items() if moves)
        self._shelves = Shelves("fsdp", context, offload.PARTS, self._part)
        self._host_gradients = offload.HostGradients(context.hardware) if config.grad_offload else None

    @property
    def layout(self) -> RankLayout:
        shared = self.config.sequence_parallel
        dp, cp = divmod(self.context.rank, shared)
        return RankLayout(dp=dp, cp=cp, dp_size=self.context.world_size // shared, cp_size=shared)

    # -- computing --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, batch: DataProto, outputs: Collection[str], *, temperature: float) -> dict[str, Tensor]:
        if unknown := set(outputs) - set(self.outputs):
            raise PluginError(f"backend fsdp does not compute {sorted(unknown)} for the role {self.context.role}")
        self._shelves.need("parameters")
        if self.outputs == ("scores",):
            return {"scores": self._scores(batch)}
        responses, attention_mask = batch.batch["responses"], batch.batch["attention_mask"]
        wanted = attention_mask[:, attention_mask.shape[1] - responses.shape[1] :]
        tokens = Tokens.of(batch.batch["input_ids"], attention_mask, wanted, vocab_size=self.vocab_size)
        plan = self._plan(tokens)
        result = {name: torch.zeros(wanted.shape, device=self.device) for name in outputs}
        for rows in self._even(plan):
            packed = pack(tokens, rows, self.device, self.ranks)
            computed = self._evaluate(packed, temperature, outputs)
            if packed is not None and computed is not None:
                where = torch.tensor(rows, device=self.device)[packed.row], packed.column
                for name in result:
                    result[name][where] = computed[name]
        sharding.release(self.model)
        return result

    def reference_forward(self, batch: DataProto, outputs: Collection[str], *, temperature: float) -> dict[str, Tensor]:
        if not lora.layers(self.model):
            raise RunError("without an adapter the model that training started from is gone", where="backend fsdp")
        with lora.switched_off(self.model):
            return self.forward(batch, outputs, temperature=temperature)

    def update(
        self,
        batch: DataProto,
        terms: Sequence[LossTerm],
        counts: Counts,
        *,
        temperature: float,
        lr_factor: float,
    ) -> dict[str, Metric]:
        if self.optimizer is None:
            raise RunError(f"the model of role {self.context.role!r} has no optimizer, so it cannot be updated")
        self._shelves.need(*offload.PARTS)
        learning = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        objective = Objective.of(terms, self.outputs)
        mask = batch.batch["response_mask"]
        tokens = Tokens.of(batch.batch["input_ids"], batch.batch["attention_mask"], mask, vocab_size=self.vocab_size)
        plan = self._plan(tokens, objective.joins(batch))
        objective.check(len(plan), self.layout.dp_size)
        columns = Columns(batch, self.device)
        total = torch.zeros((), device=self.device)
        parts: list[dict[str, Metric]] = []
        self.optimizer.zero_grad(set_to_none=True)
        if self._host_gradients is not None:
            self._host_gradients.clear()
        for number, rows in enumerate(self._even(plan)):
            if number and self._host_gradients is not None:
                self._host_gradients.put(learning)
            packed = pack(tokens, rows, self.device, self.ranks)
            computed = self._evaluate(packed, temperature, objective.outputs)
            loss = torch.zeros((), device=self.device)
            if rows:
                zeros = torch.zeros(len(rows), mask.shape[1], device=self.device)
                inputs = dict.fromkeys(objective.outputs, zeros)
                if packed is not None and computed is not None:
                    where = packed.row, packed.column
                    inputs = {name: zeros.index_put(where, computed[name]) for name in inputs}
                loss, metrics = objective(LossInputs(**inputs), columns.of(rows), counts)
                parts.append(metrics)
            total += loss.detach()
            if packed is None and computed is not None:  # a part in the collective calls of others, worth nothing
                loss = loss + 0 * computed[objective.outputs[0]].sum()
            if loss.requires_grad:
                loss.backward()
        if self._host_gradients is not None:
            self._host_gradients.take(learning)
        total /= self.config.sequence_parallel  # the ranks that share rows have the same loss, and all ranks are summed
        skipped = self.skipped
        metrics = self._step(self.optimizer, sharding.reduce(total, self.device), lr_factor)
        return metrics if self.skipped > skipped else merge_metrics(parts) | metrics

    def _evaluate(
        self, packed: Packed | None, temperature: float, outputs: Collection[str]
    ) -> dict[str, Tensor] | None:
        """Log-probs (and entropies), or values, of the wanted tokens, ``(wanted,)`` each.

        A rank without work computes a filler where the model is sharded, and None elsewhere.
        """
        if not temperature > 0:
            raise UserError(f"log-probabilities at temperature {temperature} are undefined", where="temperature")
        if packed is None:
            if self.context.world_size == 1:
                return None
            packed = filler(self.device, self.ranks)
        target = packed.target
        compute_dtype = self._compute_dtype

        def consume(hidden: Tensor, head: Head | nn.Linear) -> dict[str, Tensor]:
            if isinstance(head, nn.Linear):
                with torch.autocast(self.device.type, enabled=False):
                    return {"values": values_of(hidden, head)}
            dtype = compute_dtype or head.weight.dtype
            head = Head(weight=head.weight.to(dtype), bias=None if head.bias is None else head.bias.to(dtype),
                        scale=head.scale, softcap=head.softcap)  # fmt: skip
            with torch.autocast(self.device.type, enabled=False):
                log_probs, entropies = token_log_probs(
                    hidden.to(dtype), target, head, temperature=temperature, entropy="entropy" in outputs,
                    chunk_tokens=self.config.log_prob_chunk_tokens, kernel=self.log_prob_kernel,
                )  # fmt: skip
            return {"log_probs": log_probs} if entropies is None else {"log_probs": log_probs, "entropy": entropies}

        with self._autocast():
            computed = cast("dict[str, Tensor]", cast(Any, self.model).packed_forward(packed, consume))
        return computed if self.ranks is None else self.ranks.gather(computed, packed)

    def _scores(self, batch: DataProto) -> Tensor:
        """Logits of a classifier, ``(rows, labels)`` in float32."""
        texts = classifier.Texts(batch, self.model, self._budget)
        result = torch.zeros(len(batch), cast(int, self.model.config.num_labels), device=self.device)
        for rows in self._even(texts.plan):
            with self._autocast():
                logits = texts.logits(self.model, rows, self.device)
            if rows:
                result[rows] = logits.float()
        sharding.release(self.model)
        return result

    @property
    def _compute_dtype(self) -> torch.dtype | None:
        return getattr(torch, self.config.compute_dtype) if self.config.compute_dtype else None

    def _autocast(self) -> AbstractContextManager[Any]:
        """What casts in one process; a sharded model's weights and inputs are in the type that is computed in."""
        wanted = self._compute_dtype is not None and self.context.world_size == 1
        return torch.autocast(self.device.type, dtype=self._compute_dtype, enabled=wanted)

    def _plan(self, tokens: Tokens, joins: Sequence[Sequence[Any]] = ()) -> list[list[int]]:
        """Rows of each micro-batch; a collective call where ranks share rows."""
        if self.ranks is not None:
            self.ranks.check_rows(tokens, self.device)
        return micro_batches(tokens.lengths, units(len(tokens.lengths), joins), self._budget)

    @property
    def _budget(self) -> int:
        """Tokens of a micro-batch."""
        return self.config.micro_batch_tokens or (2048 if self.device.type == "cpu" else 16384)

    def _even(self, plan: list[list[int]]) -> list[list[int]]:
        """The plan, with empty micro-batches up to the number that the busiest rank has."""
        busiest = int(sharding.reduce(len(plan), self.device, largest=True)) if self.context.world_size > 1 else 0
        return plan + [[]] * (busiest - len(plan))

    def _step(self, optimizer: torch.optim.Optimizer, loss: float, lr_factor: float) -> dict[str, Metric]:
        """Clip the gradients and take the step, or take none if something is not finite; all ranks decide alike."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = gradients.total_norm(parameters, self.device)
        finite, allowed = math.isfinite(loss) and math.isfinite(norm), self.config.max_skipped_steps
        if not finite and self.skipped == allowed:
            optimizer.zero_grad(set_to_none=True)
            raise not_finite(self.context.role, loss, norm, allowed=allowed)
        self.skipped = 0 if finite else self.skipped + 1
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr_factor
        if finite:
            if self.context.max_grad_norm is not None:
                gradients.clip(parameters, self.context.max_grad_norm, norm)
            if parameters:
                optimizer.step()
            self.version += 1
        optimizer.zero_grad(set_to_none=True)
        return step_metrics(
            optimizer.param_groups[0]["lr"], loss, norm, finite=finite, allowed=allowed, counts=not self.context.rank
        )

    # -- state and weights ------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        self._state(copies.as_it_is)(folder)

    def snapshot(self) -> Callable[[Path], None]:
        write = self._state(self._copies)
        self.context.hardware.synchronize()
        return write

    def _state(self, copy: copies.Copy) -> Callable[[Path], None]:
        self._shelves.need("parameters", "optimizer")
        rng = self.context.hardware.rng_state()
        return state.collect(self.model, self.optimizer, rng, *self._position(), copy)

    def load(self, folder: Path) -> None:
        self._shelves.need("parameters", "optimizer")
        state.load(folder, self.model, self.optimizer, self.context.hardware.set_rng_state, *self._position())

    def export(self, folder: Path) -> None:
        self._shelves.need("parameters")
        adapter = self.config.lora is not None and self.config.lora.export == "adapter"
        write = lora.export if adapter else names.export
        write(self.model, self.context.model, folder, rank=self.context.rank)

    def weights(self, *, bucket_bytes: int, sharded: bool = False) -> AbstractContextManager[WeightStream]:
        self._shelves.need("parameters")
        return lend(names.entries(self.model, sharded=sharded), bucket_bytes=bucket_bytes, version=self.version)

    def adapter(self, *, bucket_bytes: int) -> AbstractContextManager[WeightStream]:
        self._shelves.need("parameters")
        if self.config.lora is None:
            return super().adapter(bucket_bytes=bucket_bytes)
        return lend(lora.entries(self.model), bucket_bytes=bucket_bytes, version=self.version, kind="adapter")

    def live_module(self) -> nn.Module:
        """The model itself, in evaluation mode; with and without packing its attention is the same function.

        Raises:
            drivetrain.RunError: when the model is sharded, for then a call of it is collective, or is in host memory.
            drivetrain.UserError: when its parameters are to be offloaded while it would be called.
        """
        if "parameters" in self.offloads:
            raise UserError("parameters that leave the device cannot generate", where="backend.param_offload",
                            mend="send the weights to the rollout (hybrid_engine: {name: colocated, sharing: never}),"
                                 " or remove param_offload")  # fmt: skip
        if self.context.world_size > 1:
            raise RunError("a model that is sharded over ranks cannot generate by itself", where="backend fsdp",
                           mend="give the rollout engine weights of its own (rollout.load_weights)")  # fmt: skip
        self._shelves.need("parameters")
        return self.model

    def offload(self, parts: Collection[str]) -> None:
        """Move ``parameters``, ``gradients`` or the moments of the ``optimizer`` to pinned host memory.

        Until they are back, whatever needs them raises RunError.
        """
        sharding.release(self.model)
        if "parameters" in parts:
            offload.own_storages(self.model)
        self._shelves.put(parts)

    def onload(self, parts: Collection[str]) -> None:
        self._shelves.take(parts)

    def memory(self) -> dict[str, int]:
        """Bytes on the device by part."""
        return self._shelves.memory()

    def _part(self, name: str) -> list[Tensor]:
        return offload.part(name, self.model, self.optimizer)

    def close(self) -> None:
        self.optimizer = None
        del self.model
        self.context.hardware.empty_cache()

    def _position(self) -> tuple[int, int]:
        return self.context.rank, self.context.world_size
