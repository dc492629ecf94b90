"""PPO with an actor, a critic and a reward model of megatron-core is PPO with those of transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import recorded
import tiny
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from drivetrain import BackendContext, DataProto, resolve
from drivetrain.config import ModelConfig, PluginConfig
from drivetrain.testing.processes import install

STEPS = 3
COMPARED = ("loss", "grad_norm", "critic_loss", "critic_grad_norm", "reward/reward_model", "explained_variance")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with a policy, a reward model, and the config of a run."""
    tiny.write_configs(tmp_path)
    about = tmp_path / "model" / "config.json"  # transformers gives a pad token no gradient where it is read
    about.write_text(json.dumps(json.loads(about.read_text()) | {"pad_token_id": None}))
    tiny.write_tokenizer(tmp_path / "judge")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, num_labels=1, initializer_range=0.3,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "judge")
    return tmp_path


def train(folder: Path, pythonpath: str, name: str, *settings: str) -> list[dict[str, float]]:
    """Run the command line in a process of its own; returns the metrics of the steps."""
    command = [sys.executable, "-c", "from drivetrain.cli.main import main; main()", "train", str(folder / "grpo.yaml")]
    done = subprocess.run(
        [*command, "algorithm.name=ppo", "algorithm.old_log_probs=recompute", "rewards=[]", "data.eval=null",
         "data.batch_prompts=12", "actor.mini_batch_prompts=6", "actor.optimizer.eps=1e-4",  # hides rounding
         "hybrid_engine.name=colocated", f"trainer.steps={STEPS}", f"trainer.run_dir={folder / name}",
         f"reward_model.model.path={folder / 'judge'}", *settings],
        env={**os.environ, "PYTHONPATH": pythonpath}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] > 0]


def test_two_tensor_ranks_train_as_fsdp_does(models: Path) -> None:
    pythonpath = install(Path(recorded.__file__), models / "site")
    trace = models / "trace"
    trace.mkdir()
    one = train(models, pythonpath, "one", "rollout.name=recording", f"rollout.folder={trace}")
    two = train(models, pythonpath, "two", "rollout.name=replay", f"rollout.folder={trace}", "executor.name=ray",
                "executor.processes=2", "executor.num_cpus=4", "actor.backend.name=megatron",
                "actor.backend.tensor_model_parallel_size=2")  # fmt: skip
    assert [row["step"] for row in one] == [row["step"] for row in two] == [1, 2, 3]
    assert min(row["train/critic_grad_norm"] for row in one) > 0
    for alone, together in zip(one, two):
        for key in (f"train/{name}" for name in COMPARED):
            assert together[key] == pytest.approx(alone[key], rel=1e-5, abs=1e-5), (alone["step"], key)


def backend(name: str, role: str, folder: Path) -> Any:
    """A backend of a model that does not learn, in this process."""
    spec = {"fsdp": ("drivetrain_backend_fsdp", "FSDPBackend", "FSDPConfig"),
            "megatron": ("drivetrain_backend_megatron", "MegatronBackend", "MegatronConfig")}[name]  # fmt: skip
    made = resolve("backends", name)(
        getattr(__import__(f"{spec[0]}.config", fromlist=["config"]), spec[2])(),
        BackendContext(
            role=role,
            model=ModelConfig(path=folder),
            optimizer=None,
            max_grad_norm=None,
            rank=0,
            world_size=1,
            seed=3,
            hardware=resolve("hardware", "cpu")(PluginConfig(name="cpu")),
        ),
    )
    made.initialize()
    return made


def test_a_critic_of_one_backend_is_one_of_the_other(models: Path) -> None:
    random = torch.Generator().manual_seed(2)
    ids = torch.randint(4, 18, (4, 9), generator=random)
    rows = DataProto.from_dict({"input_ids": ids, "attention_mask": torch.ones_like(ids), "responses": ids[:, 4:]})
    folder, found = models / "model", []
    for name in ("fsdp", "megatron", "fsdp", "megatron"):  # the first draws its head, as the second would
        made = backend(name, "critic", folder)
        found.append(made.forward(rows, ("values",), temperature=1.0)["values"])
        made.export(models / f"critic-{len(found)}")
        made.close()
        folder = models / f"critic-{len(found)}"
    made = backend("megatron", "critic", models / "model")
    found.append(made.forward(rows, ("values",), temperature=1.0)["values"])
    made.close()
    assert float(found[0].std()) > 0.01
    assert all(torch.allclose(values, found[0], rtol=0, atol=1e-6) for values in found[1:])
    texts = rows.select(["input_ids", "attention_mask"])
    judged = []
    for name in ("fsdp", "megatron"):
        made = backend(name, "reward", models / "judge")
        judged.append(made.forward(texts, ("scores",), temperature=1.0)["scores"])
        made.close()
    assert judged[0].shape == (4, 1) and torch.allclose(*judged, rtol=2e-6, atol=2e-6)
