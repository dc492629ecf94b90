"""Workers that return tensors of the right shapes and compute nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drivetrain import DataProto, LossTerm, Worker, register
from drivetrain.metrics import Metric, Sum
from drivetrain.numerics import Counts

TOKENS = ("input_ids", "attention_mask", "responses")
"""What a backend reads of a batch to compute log-probs or values."""
ACTOR_LEARNS = (*TOKENS, "response_mask", "old_log_probs", "advantages")
CRITIC_LEARNS = (*TOKENS, "response_mask", "values", "returns")


class IdleWorker(Worker):
    """Plays actor, rollout, reference and critic. A method reads the columns that a real one reads."""

    def __init__(self, *args: Any, response_tokens: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.response_tokens = response_tokens
        self.made: dict[int, dict[str, Tensor]] = {}
        self.own_s, self.cpu_s = 0.0, time.process_time()

    @contextmanager
    def own(self) -> Iterator[None]:
        """Count what happens inside as the worker's own time."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.own_s += time.perf_counter() - start

    def of(self, rows: int) -> dict[str, Tensor]:
        """Columns of responses that are half to wholly full, made once for a number of rows."""
        if rows not in self.made:
            draw = torch.Generator().manual_seed(self.rank)
            shape = (rows, self.response_tokens)
            lengths = torch.randint(shape[1] // 2, shape[1] + 1, (rows, 1), generator=draw)
            self.made[rows] = {
                "responses": torch.randint(3, 32000, shape, generator=draw),
                "response_mask": (torch.arange(shape[1]) < lengths).long(),
                "log_probs": -torch.rand(shape, generator=draw),
            }
        return self.made[rows]

    @register()
    def take_seconds(self) -> dict[str, float]:
        """Seconds of the methods' own work, and of CPU in this process, since the last time."""
        now = time.process_time()
        taken = {"own": self.own_s, "cpu": now - self.cpu_s}
        self.own_s, self.cpu_s = 0.0, now
        return taken

    @register()
    def shares_weights(self) -> bool:
        return True

    @register()
    def enter_generation(self, version: int) -> Mapping[str, float]:
        return {}

    @register()
    def enter_training(self) -> Mapping[str, float]:
        return {}

    @register("dp_compute_proto", mesh="rollout")
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        ids, mask = prompts["input_ids"], prompts["attention_mask"]
        with self.own():
            times = prompts.meta_info["samples"]
            rows = prompts.repeat(times)
            made = self.of(len(rows))
            ids, mask = ids.repeat_interleave(times, 0), mask.repeat_interleave(times, 0)
            return DataProto.from_dict(
                {
                    "prompts": ids,
                    "responses": made["responses"],
                    "input_ids": torch.cat([ids, made["responses"]], dim=1),
                    "attention_mask": torch.cat([mask, made["response_mask"]], dim=1),
                    "response_mask": made["response_mask"],
                    "rollout_log_probs": made["log_probs"],
                },
                {
                    **rows.non_tensor_batch,
                    "sample_index": np.arange(len(rows)) % times,
                    "finish_reason": np.array(["stop"] * len(rows), dtype=object),
                    "weight_version": np.zeros(len(rows), dtype=np.int64),
                },
            )

    @register("dp_compute_proto")
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        made = self._read(batch, TOKENS)
        return DataProto.from_dict({"old_log_probs": made["log_probs"], "entropy": made["log_probs"]})

    @register("dp_compute_proto")
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"ref_log_probs": self._read(batch, TOKENS)["log_probs"]})

    @register("dp_compute_proto")
    def compute_values(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"values": self._read(batch, TOKENS)["log_probs"]})

    @register("dp_compute_metric")
    def update_critic(
        self, batch: DataProto, terms: Sequence[LossTerm], counts: Counts, lr_factor: float
    ) -> dict[str, Metric]:
        self._read(batch, CRITIC_LEARNS)
        return {name: Sum(0.0) for name in ("loss", "grad_norm", "lr", "value_clipped")}

    @register("dp_compute_metric")
    def update_actor(
        self, batch: DataProto, terms: Sequence[LossTerm], counts: Counts, lr_factor: float
    ) -> dict[str, Metric]:
        self._read(batch, ACTOR_LEARNS)
        return {name: Sum(0.0) for name in ("loss", "grad_norm", "lr", "approx_kl", "clipped")}

    def _read(self, batch: DataProto, names: Sequence[str]) -> dict[str, Tensor]:
        for name in names:
            batch[name]
        with self.own():
            return self.of(len(batch))
