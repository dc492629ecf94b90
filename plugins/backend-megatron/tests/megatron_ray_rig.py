"""A run, and workers written by hand, in a file that the processes of Ray can import."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import megatron_rig as rig
import torch

from drivetrain import ActorRolloutRefWorker, CriticWorker, DataProto, RunConfig, get_registry, load_config, register
from drivetrain.metrics import Metric
from drivetrain_backend_megatron import MegatronPPOActor, MegatronWorker

SECTIONS = {"actor": "actor_rollout_ref.actor.megatron", "ref": "actor_rollout_ref.ref.megatron",
            "critic": "critic.megatron"}  # fmt: skip
OFFLOADED = [f"{SECTIONS[role]}.{part}_offload=True" for role in ("actor", "critic")
             for part in ("param", "grad", "optimizer")] + [f"{SECTIONS['ref']}.param_offload=True"]  # fmt: skip


def write_run(folder: Path) -> None:
    """A model of two layers, and a prompt."""
    rig.write_tokenizer(rig.write_model("tied", folder / "model", num_hidden_layers=2))
    (folder / "prompts.jsonl").write_text('{"prompt": "w3", "answer": "w4"}\n')


def config_of(folder: Path, *words: str) -> RunConfig:
    """PPO with a reference and a critic, as the command line resolves it."""
    base = [
        f"model.path={folder / 'model'}", "algorithm={name: ppo, kl_coef: 0.1, entropy_coef: 0.01}",
        "actor.backend.name=megatron", "actor.optimizer={name: adamw, lr: 1.0e-2, eps: 1.0e-3}",
        "rollout={name: hf, max_response_tokens: 4, temperature: 0.8}",
        "hybrid_engine.name=colocated", f"data.train={{name: jsonl, path: {folder}/prompts.jsonl}}",
        "data.batch_prompts=1", "rewards=[{name: exact_match}]", "hardware.name=cpu",
        f"trainer={{steps: 1, run_dir: {folder / 'run'}}}",
    ]  # fmt: skip
    return load_config(None, [*base, *words], get_registry()).run


def batch_of(rows: int) -> DataProto:
    """Prompts of two to five tokens, left padded."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, rig.VOCAB, (rows, 5), generator=draw)
    mask = (torch.arange(5) >= torch.arange(rows)[:, None] % 4).long()
    return DataProto.from_single_dict({"input_ids": ids * mask, "attention_mask": mask})


class Placed(MegatronWorker):
    """Says who had which rows."""

    @register("MEGATRON_COMPUTE_PROTO")
    def by_dp(self, data: DataProto) -> DataProto:
        """Which rank had a row, and the number of rows that it had."""
        return self.had(data)

    @register("MEGATRON_PP_AS_DP_PROTO")
    def by_dp_and_pp(self, data: DataProto) -> DataProto:
        """Likewise."""
        return self.had(data)

    @register("MEGATRON_PP_ONLY")
    def stages(self) -> int:
        """The rank."""
        return self.rank

    def had(self, data: DataProto) -> DataProto:
        """The rows with the rank, and how many they are."""
        columns: Mapping[str, Any] = {"rank": self.rank, "rows": len(data)}
        return DataProto.from_dict({name: torch.full((len(data),), value) for name, value in columns.items()}
                                   | {"row": data["row"]})  # fmt: skip


class ActorRollout(Placed, ActorRolloutRefWorker):
    """The generic worker."""


class Critic(MegatronWorker, CriticWorker):
    """The generic worker."""


class Actor(Placed):
    """The policy and its reference, by hand."""

    @register("ONE_TO_ALL")
    def init_model(self) -> None:
        """Load both."""
        self.actor, self.ref = MegatronPPOActor(self), MegatronPPOActor(self, "ref")

    @register("MEGATRON_COMPUTE_PROTO")
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Of the policy."""
        return self.actor.compute_log_prob(data)

    @register("MEGATRON_COMPUTE_PROTO")
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Of the reference."""
        return self.ref.compute_log_prob(data)

    @register("DP_COMPUTE_METRIC")
    def update_actor(self, data: DataProto) -> dict[str, Metric]:
        """Two steps on all rows."""
        return self.actor.update_policy([data, data])

    @register()
    def begin_again(self, sizes: dict[str, int]) -> None:
        """Let the models go, and be parallel in another way."""
        for backend in self.backends.values():
            backend.close()
        self.backends.clear()
        self.init_megatron(**sizes)
