"""A checkpoint of ranks with any sizes is read by ranks with any others, bit for bit; what is damaged is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_learning as learning
import megatron_rig as rig
import pytest
import torch
import torch.multiprocessing as multiprocessing
from megatron_resuming import Hop, Seen, Start, everything, same, work

from drivetrain import CheckpointError, NonFiniteError
from drivetrain_backend_common import tensor_files

pytestmark = pytest.mark.usefixtures("groups_go")

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
VPP, SP, DO = "virtual_pipeline_model_parallel_size", "sequence_parallel", "use_distributed_optimizer"
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tied": ({}, {}),
    "qwen2": ({"num_hidden_layers": 2}, {"dtype": "bfloat16"}),
    "mixtral": ({"num_hidden_layers": 2}, {}),
}
HOPS: dict[int, list[Hop]] = {
    2: [
        Hop("tied", "tied-1", "tied-tensor", {TP: 2}),
        Hop("tied", "tied-tensor", "tied-stages", {PP: 2, VPP: 2}),
        Hop("tied", "tied-stages", "tied-data", {DO: True}),
        Hop("tied", "tied-data", "tied-sequence", {TP: 2, SP: True}),
        Hop("tied", "tied-sequence", "tied-context", {CP: 2, DO: True}),
        Hop("qwen2", "qwen2-1", "qwen2-data", {DO: True}),
        Hop("qwen2", "qwen2-data", "qwen2-tensor", {TP: 2, DO: True}),
        Hop("qwen2", "qwen2-tensor", "qwen2-stages", {PP: 2}),
        Hop("mixtral", "mixtral-1", "mixtral-experts", {EP: 2, DO: True}),
        Hop("mixtral", "mixtral-experts", "mixtral-tensor", {TP: 2, SP: True}),
        Hop("mixtral", "mixtral-tensor", "mixtral-whole", {TP: 2, SP: True, ETP: 1}),
    ],
    4: [
        Hop("tied", "tied-context", "tied-4", {TP: 2, DO: True}),
        Hop("qwen2", "qwen2-stages", "qwen2-4", {TP: 2, PP: 2}),
        Hop("mixtral", "mixtral-whole", "mixtral-4", {TP: 2, SP: True, EP: 2, ETP: 1, DO: True}),
    ],
}  # fmt: skip


def resumed(folder: Path, name: str, checkpoint: str, **sizes: Any) -> dict[str, torch.Tensor]:
    """All that one process reads."""
    made = learning.backend(folder / name, model=MODELS[name][1], **sizes)
    made.load(folder / checkpoint)
    found = everything(made)
    made.close()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With models, and a checkpoint of each after two steps in one process."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, (entries, options) in MODELS.items():
        rig.write_model(name, folder / name, **entries)
        made = learning.backend(folder / name, model=options)
        for step in range(2):
            learning.update(made, step)
        (folder / f"{name}-1").mkdir()
        made.save(folder / f"{name}-1")
        exported, state = learning.whole_weights(made), everything(made)
        torch.save(tuple(Start(options, exported, state, learning.update(made, 0))), folder / f"{name}.pt")
        made.close()
    return folder


def start(folder: Path, name: str) -> Start:
    return Start(*torch.load(folder / f"{name}.pt"))


def test_ranks_with_other_sizes_go_on(folder: Path) -> None:
    for processes, hops in HOPS.items():
        multiprocessing.spawn(work, (processes, folder, hops), nprocs=processes)
        ranks = [torch.load(folder / f"seen-{processes}-{rank}.pt") for rank in range(processes)]
        wrong = []
        for number, hop in enumerate(hops):
            close = 2e-2 if hop.model == "qwen2" else 2e-5  # in bfloat16, ranks round their parts of sums
            for seen in (Seen(*rank[number]) for rank in ranks):
                if not (seen.weights and seen.random and seen.loss < close and seen.norm < close):
                    wrong.append((hop, seen))
            if not same(resumed(folder, hop.model, hop.write), start(folder, hop.model).state):
                wrong.append((hop, "not what was written first"))
        assert not wrong


@pytest.mark.parametrize("name", ["tied", "qwen2"])
@pytest.mark.parametrize("distributed", [False, True])
def test_what_is_read_is_what_was_written(folder: Path, name: str, distributed: bool) -> None:
    """By an optimizer that has taken other steps, and by one with shares of what the other had whole."""
    made = learning.backend(folder / name, model=MODELS[name][1], use_distributed_optimizer=distributed,
                            param_offload=True, optimizer_offload=True)  # fmt: skip
    learning.update(made, 1)
    made.load(folder / f"{name}-1")
    written = start(folder, name)
    assert same(everything(made), written.state) and written.state["steps"] == 2
    made.offload(made.offloads)
    made.onload(made.offloads)
    assert learning.update(made, 0) == pytest.approx(written.step, rel=1e-6 * distributed)  # which sums parts


def test_a_checkpoint_of_the_beginning_has_no_moments(folder: Path, tmp_path: Path) -> None:
    made = learning.backend(folder / "tied")
    made.save(tmp_path)
    first = [learning.update(made, step) for step in range(2)]
    made.load(tmp_path)
    assert not any(name.startswith("exp_avg") for name in everything(made))
    assert [learning.update(made, step) for step in range(2)] == first


def test_random_numbers_go_on(folder: Path, tmp_path: Path) -> None:
    made = learning.backend(folder / "tied")
    made.save(tmp_path)
    drawn = torch.rand(3)
    made.load(tmp_path)
    assert torch.rand(3).equal(drawn)


def test_a_large_state_is_cut_into_files(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "FILE_BYTES", 10_000)
    read = learning.backend(folder / "tied")
    read.load(folder / "tied-1")
    read.save(tmp_path)
    *_, last = parts = sorted(tmp_path.glob("rank-0*.safetensors"))
    assert len(parts) > 3
    again = learning.backend(folder / "tied")
    again.load(tmp_path)
    assert same(everything(again), start(folder, "tied").state)
    last.unlink()
    with pytest.raises(CheckpointError, match="files of some are missing"):
        again.load(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_does_not_learn_reads_the_weights(folder: Path, dtype: str) -> None:
    made = learning.backend(folder / "tied", learns=False, model={"dtype": dtype})
    made.load(folder / "tied-1")
    wanted = {name: tensor.to(getattr(torch, dtype)) for name, tensor in start(folder, "tied").exported.items()}
    assert same(learning.whole_weights(made), wanted)


def edited(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what a rank says of its part."""
    file = folder / "rank-0.json"
    about = json.loads(file.read_text())
    change(about)
    file.write_text(json.dumps(about))


def cut(folder: Path) -> None:
    file = folder / "rank-0.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


NORM = "decoder.final_layernorm.weight"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no files": (lambda folder: (folder / "rank-0.json").unlink(), "holds no state of backend megatron"),
    "no tensors": (lambda folder: (folder / "rank-0.safetensors").unlink(), "not complete: 1 ranks wrote it"),
    "another rank": (lambda folder: edited(folder, lambda about: about.update(world_size=2)), "2 ranks wrote it"),
    "cut": (cut, "cannot be read"),
    "no JSON": (lambda folder: (folder / "rank-0.json").write_text("{"), "cannot be read"),
    "no parameter": (lambda folder: edited(folder, lambda about: about["parameters"].pop(NORM)), "holds nothing for"),
    "no moment": (lambda folder: edited(folder, lambda about: about["parameters"][NORM]["parts"].update(
        exp_avg=[0, 16, "torch.float32"])), "has 16 of 32 numbers of exp_avg"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused(folder: Path, tmp_path: Path, damage: str) -> None:
    for file in (folder / "tied-1").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change, says = DAMAGE[damage]
    change(tmp_path)
    with pytest.raises(CheckpointError, match=says):
        learning.backend(folder / "tied").load(tmp_path)


def test_a_checkpoint_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    other = rig.write_model("tied", tmp_path, hidden_size=64)
    with pytest.raises(CheckpointError, match=r"(?s)holds.*\(51, 32\).*the model has.*\(51, 64\)"):
        learning.backend(other).load(folder / "tied-1")
    with pytest.raises(CheckpointError, match="in torch.float32; the model has it in torch.bfloat16"):
        learning.backend(folder / "tied", model={"dtype": "bfloat16"}).load(folder / "tied-1")


def test_what_cannot_be_written_says_so(folder: Path, tmp_path: Path) -> None:
    made = learning.backend(folder / "tied")
    with pytest.raises(CheckpointError, match="rank 0 cannot write its part"):
        made.save(tmp_path / "nowhere")
    next(made.optimizer.held())[1].data.view(-1)[0] = torch.nan
    for save in (made.save, lambda folder: made.snapshot()(folder)):
        with pytest.raises(NonFiniteError, match="is not finite"):
            save(tmp_path)
    assert not list(tmp_path.iterdir())
