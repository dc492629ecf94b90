"""Families of models that other distributions offer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import megatron_rig as rig
import pytest

PLUGIN = """
from drivetrain import ModelFamilySpec, hookimpl

@hookimpl
def drivetrain_model_families():
    yield ModelFamilySpec(name="{name}", summary="Mistral.", factory="acme_family.plugin:{factory}",
                          model_types=("{model_type}",), backend="{backend}")

def __getattr__(name):
    if name != "MISTRAL":
        raise AttributeError(name)
    from drivetrain_backend_megatron import Family
    return Family(must_be={"sliding_window": (None,)})
"""
MODEL = """
import sys
from pathlib import Path

import torch
import megatron_learning as learning
from transformers import AutoModelForCausalLM

folder, data = sys.argv[1], learning.batch()
made = learning.backend(Path(folder), learns=False)
found = made.forward(data, ("log_probs",), temperature=1.0)["log_probs"]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
real = data.batch["attention_mask"]
places = (real.cumsum(1) - 1).clamp(min=0)
with torch.no_grad():
    logits = model(input_ids=data.batch["input_ids"], attention_mask=real, position_ids=places).logits[:, -10:-1]
wanted = logits.log_softmax(-1).gather(-1, data.batch["responses"][..., None])[..., 0] * real[:, -9:]
print(float((found - wanted).abs().max()))
"""
REFUSED = """
from drivetrain_backend_megatron.families import family
family({"model_type": "llama", "hidden_act": "silu"})
"""


def install(site: Path, **words: str) -> dict[str, str]:
    """Write a distribution; returns the environment in which it is installed."""
    text = PLUGIN
    for word, value in words.items():
        text = text.replace(f"{{{word}}}", value)
    files = {"acme_family/__init__.py": "", "acme_family/plugin.py": text,
             "acme_family-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: acme-family\nVersion: 1.0\n",
             "acme_family-1.0.dist-info/entry_points.txt": "[drivetrain]\nfamily = acme_family.plugin\n"}  # fmt: skip
    for name, content in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(content)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(Path(__file__).parent)])}


def python(code: str, environment: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_family_of_another_distribution_computes_what_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rig.FAMILIES, "mistral", ("Mistral", {"sliding_window": None}))
    folder = rig.write_model("mistral", tmp_path / "model", num_hidden_layers=2)
    environment = install(tmp_path / "site", name="acme", factory="MISTRAL", model_type="mistral",
                          backend="megatron")  # fmt: skip
    done = python(MODEL, environment, folder)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 6e-6


@pytest.mark.parametrize(
    "words, says",
    [
        ({"name": "acme", "factory": "MISTRAL", "backend": "megatron"}, "several families: acme, megatron_llama"),
        ({"name": "megatron_llama", "factory": "MISTRAL", "backend": "megatron"}, "offered by 2 distributions"),
        ({"name": "acme", "factory": "MISTRAL", "backend": "other"}, ""),
    ],
)
def test_one_type_has_one_family(tmp_path: Path, words: dict[str, str], says: str) -> None:
    done = python(REFUSED, install(tmp_path, model_type="llama", **words))
    assert done.returncode == bool(says) and says in done.stderr


def test_what_is_no_family_is_refused(tmp_path: Path) -> None:
    environment = install(tmp_path, name="acme", factory="hookimpl", model_type="acme", backend="megatron")
    done = python(REFUSED.replace("llama", "acme"), environment)
    assert done.returncode == 1 and "'acme' is a HookimplMarker, and not a Family" in done.stderr
