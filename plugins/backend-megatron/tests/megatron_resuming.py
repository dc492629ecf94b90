"""What processes do with checkpoints, and all that is in a backend's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import megatron_learning as learning
import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain_backend_megatron import weights
from drivetrain_backend_megatron.backend import MegatronBackend


def everything(made: MegatronBackend) -> dict[str, Tensor]:
    """Weights, what the optimizer holds of them, and its steps, of a model in one process."""
    model = weights.held(made.pieces)
    found = {name: tensor.detach().clone() for name, tensor in model.items()}
    names = {id(tensor): name for name, tensor in model.items()}
    for (parameter, start), updated, moments in made.optimizer.held():
        assert start == 0
        held = {"updated": updated, **{key: value for key, value in moments.items() if key != "step"}}
        found |= {f"{key} of {names[id(parameter)]}": value.detach().view(parameter.shape).clone()
                  for key, value in held.items()}  # fmt: skip
    return found | {"steps": torch.tensor(made.optimizer.steps)}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(other[name].equal(tensor) for name, tensor in one.items())


class Hop(NamedTuple):
    """Ranks that read one checkpoint and write another."""

    model: str
    read: str
    write: str
    sizes: dict[str, Any]


class Start(NamedTuple):
    """What one process had when it wrote the first checkpoint of a model, and its next step."""

    options: dict[str, Any]  # of the model
    exported: dict[str, Tensor]
    state: dict[str, Tensor]
    step: tuple[float, float]  # loss and norm


class Seen(NamedTuple):
    """On one rank."""

    weights: bool  # whether they are bit for bit those of the start
    loss: float  # difference from the start's
    norm: float  # relative
    random: bool  # whether the random state stayed as it was


def work(rank: int, processes: int, folder: Path, hops: list[Hop]) -> None:
    """On each of some processes: every hop, with process groups of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{processes}", rank=rank,
                            world_size=processes)  # fmt: skip
    seen = []
    for number, hop in enumerate(hops):
        start = Start(*torch.load(folder / f"{hop.model}.pt"))
        made = learning.backend(folder / hop.model, rank=rank, world_size=processes, model=start.options, **hop.sizes)
        (folder / hop.write).mkdir(exist_ok=True)
        torch.manual_seed(7)
        before = torch.get_rng_state()
        made.load(folder / hop.read)
        kept = torch.get_rng_state().equal(before)
        found = learning.whole_weights(made)
        if number % 2:
            made.save(folder / hop.write)
            loss, norm = learning.update(made, 0)
        else:
            write = made.snapshot()
            loss, norm = learning.update(made, 0)
            write(folder / hop.write)  # what was copied before the step
        dist.barrier()
        seen.append(tuple(Seen(same(found, start.exported), abs(loss - start.step[0]), abs(norm / start.step[1] - 1),
                               kept)))  # fmt: skip
        made.close()
    torch.save(seen, folder / f"seen-{processes}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
