"""Critics and reward models: what processes do with them, and the same mathematics in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import megatron_learning as learning
import megatron_rig as rig
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification
from transformers import models as transformers_models

from drivetrain import BackendContext, DataProto, LossTerm, resolve
from drivetrain.config import ModelConfig, PluginConfig
from drivetrain.numerics import Counts, LossInputs
from drivetrain_backend_megatron import weights
from drivetrain_backend_megatron.backend import MegatronBackend
from drivetrain_backend_megatron.config import MegatronConfig

TERMS = (LossTerm(name="value_clip", args={"clip_range": 0.4}),)
FACTORS = (1.0, 0.5)  # of the learning rate, step by step
PAD = 4  # of reward models that know of padding, and a token that texts end with, too
LABELS = 3


def write(name: str, folder: Path, kind: str, **other: Any) -> Path:
    """A random classifier of a family; ``kind`` is ``Token`` for a critic, and ``Sequence`` for a reward model."""
    family, options = rig.FAMILIES[name]
    torch.manual_seed(7)
    shape = {"num_labels": 1 if kind == "Token" else LABELS, **other}
    config = getattr(transformers_models, f"{family}Config")(**rig.SMALL | options | shape)
    model = getattr(transformers_models, f"{family}For{kind}Classification")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder, max_shard_size="40KB")
    rig.write_tokenizer(folder)
    return folder


def backend(
    role: str, folder: Path, *, rank: int = 0, world_size: int = 1, model: Any = None, learns: bool = True,
    **options: Any,
) -> MegatronBackend:  # fmt: skip
    """A backend of a critic or a reward model that is ready to work."""
    context = BackendContext(
        role=role, model=ModelConfig(path=folder, **(model or {})), max_grad_norm=learning.MAX_NORM,
        optimizer=learning.Adam() if learns and role == "critic" else None,
        hardware=resolve("hardware", "cpu")(PluginConfig(name="cpu")), rank=rank, world_size=world_size, seed=5,
    )  # fmt: skip
    made = MegatronBackend(MegatronConfig(**{"micro_batch_tokens": 30} | options), context)
    made.initialize()
    return made


def batch() -> DataProto:
    """The rows that policies learn from, with old values and returns, NaN wherever nothing may look."""
    data, random = learning.batch(), torch.Generator().manual_seed(4)
    mask = data.batch["response_mask"] == 1
    drawn = torch.randn(2, *mask.shape, generator=random) * 2
    return data.with_columns(**{name: torch.where(mask, column, torch.nan) for name, column in
                                zip(("values", "returns"), drawn)})  # fmt: skip


def share(dp: int, size: int) -> slice:
    """The rows of a data parallel rank, of which the first has most."""
    return slice(0, learning.ROWS) if size == 1 else slice(0, 9) if dp == 0 else slice(9, learning.ROWS)


class Expected(NamedTuple):
    """What transformers makes of the batch."""

    values: Tensor
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]  # of the first step, before they are clipped
    weights: dict[str, Tensor]  # after all steps, both under the names of a folder


def expected(folder: Path) -> Expected:
    """Steps of AdamW on padded rows in float32."""
    model = AutoModelForTokenClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    data = batch()
    real, width = data.batch["attention_mask"], learning.RESPONSE
    mask = data.batch["response_mask"] == 1
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if (p.dim() >= 2) == matrices], "weight_decay": 0.1 * matrices}
         for matrices in (True, False)],
        lr=1e-2, betas=(0.8, 0.9), eps=1e-3,
    )  # fmt: skip
    values, gradients, losses, norms = torch.zeros(()), {}, [], []
    for step in range(len(FACTORS)):
        found = model(input_ids=data.batch["input_ids"], attention_mask=real, use_cache=False,
                      position_ids=(real.cumsum(1) - 1).clamp(min=0)).logits[:, -width - 1 : -1, 0]  # fmt: skip
        inputs = LossInputs(values=torch.where(mask, found, 0))
        loss = resolve("policy_losses", "value_clip")(
            inputs, data.batch, Counts.of(data.batch["response_mask"], None), **TERMS[0].args
        ).loss
        optimizer.zero_grad()
        loss.backward()
        if not step:
            values = torch.where(real[:, -width:] == 1, found.detach(), 0)
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), learning.MAX_NORM)))
        losses.append(float(loss.detach()))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * FACTORS[step]
        optimizer.step()
    after = {name: tensor.detach() for name, tensor in model.named_parameters()}
    assert min(norms) > learning.MAX_NORM
    return Expected(values, losses, norms, rig._on_disk(gradients), rig._on_disk(after))


def update(made: MegatronBackend, step: int) -> tuple[float, float]:
    """Take a step; its loss and gradient norm."""
    data, where = batch(), made.layout
    counts = Counts.of(data.batch["response_mask"], None)
    metrics = made.update(data[share(where.dp, where.dp_size)], TERMS, counts, temperature=0.7,
                          lr_factor=FACTORS[step])  # fmt: skip
    return metrics["loss"].result(), metrics["grad_norm"].result()


def texts() -> DataProto:
    """Rows of 1 to 9 tokens, some of which end with what may be padding, and one of which is nothing else."""
    random = torch.Generator().manual_seed(9)
    lengths = torch.tensor([3, 9, 1, 7, 5, 2])
    ids = torch.randint(5, rig.VOCAB, (len(lengths), 9), generator=random)
    ids[0, 2] = ids[1, 8] = ids[1, 7] = ids[3, 2] = ids[5, 0] = ids[5, 1] = PAD
    mask = (torch.arange(9) < lengths[:, None]).long()
    ids[mask == 0] = rig.VOCAB + 100  # nothing may look
    return DataProto.from_dict({"input_ids": ids, "attention_mask": mask})


@torch.no_grad()
def scores(folder: Path) -> Tensor:
    """``(rows, labels)`` by transformers, one text at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    data = texts().batch
    rows = zip(data["input_ids"], data["attention_mask"])
    return torch.cat([model(input_ids=ids[real == 1][None]).logits for ids, real in rows])


class Seen(NamedTuple):
    """The largest differences from what was expected, on this rank."""

    values: float
    gradients: float | None  # over the largest one; None where ranks have sums of a share of them alone
    losses: float
    norms: float  # relative
    weights: float
    head: bool  # whether all ranks of the last stage have the same
    resumed: bool
    exported: bool  # whether transformers reads what is exported
    scores: float


def compare(
    critic: Path, judge: Path, aside: Path, wanted: Expected, *, rank: int, world_size: int, **options: Any
) -> Seen:
    """Have a critic, then a reward model, do all that they can."""
    made = backend("critic", critic, rank=rank, world_size=world_size, **options)
    where = made.layout
    rows = share(where.dp, where.dp_size)
    found = made.forward(batch()[rows], ("values",), temperature=0.7)["values"]
    values = float((found - wanted.values[rows]).abs().max())

    gradients, held = None, weights.held(made.pieces)
    if not made.config.use_distributed_optimizer:
        step, summed = made.optimizer.step, {}
        made.optimizer.step = lambda **unused: summed.update({name: p.main_grad.clone() for name, p in held.items()})
        update(made, 0)
        made.optimizer.step = step
        gradients, largest = 0.0, max(float(gradient.abs().max()) for gradient in wanted.gradients.values())
        for name, gradient in summed.items():
            for part in made.gatherer.table[name].slices(*weights.share(made.gatherer.table[name])):
                right = wanted.gradients[part.name].narrow(part.dim, part.start, part.stop - part.start)
                got = gradient[part.at : part.at + part.rows]
                gradients = max(gradients, float((got - right).abs().max()) / largest)

    steps = [update(made, 0)]
    checkpoint = aside / "checkpoint"
    checkpoint.mkdir(exist_ok=True)
    made.save(checkpoint)
    steps.append(update(made, 1))
    after = learning.whole_weights(made)
    assert after.keys() == wanted.weights.keys()
    off = max(float((tensor - wanted.weights[name]).abs().max()) for name, tensor in after.items())
    heads: list[Any] = [None] * world_size
    dist.all_gather_object(heads, held.get("output_layer.weight"))
    heads = [tensor for tensor in heads if tensor is not None]
    head = len(heads) == world_size // where.pp_size and all(tensor.equal(heads[0]) for tensor in heads)
    made.export(aside / "exported")
    dist.barrier()
    read = AutoModelForTokenClassification.from_pretrained(aside / "exported", dtype=torch.float32)
    theirs = rig._on_disk(dict(read.named_parameters()))
    exported = after.keys() == theirs.keys() and all(theirs[name].equal(tensor) for name, tensor in after.items())
    made.close()

    made = backend("critic", aside / "exported", rank=rank, world_size=world_size, **options)
    exported &= all(tensor.equal(after[name]) for name, tensor in learning.whole_weights(made).items())
    made.load(checkpoint)
    update(made, 1)
    resumed = all(tensor.equal(after[name]) for name, tensor in learning.whole_weights(made).items())
    made.close()

    made = backend("reward", judge, rank=rank, world_size=world_size, **options)
    few = slice(0, 6) if where.dp_size == 1 else slice(0, 4) if where.dp == 0 else slice(4, 6)
    given = made.forward(texts()[few], ("scores",), temperature=1.0)["scores"]
    judged = float((given - scores(judge)[few]).abs().max())
    none = made.forward(texts()[: 0 if where.dp else 6], ("scores",), temperature=1.0)["scores"]
    assert given.shape[1] == LABELS and none.shape == (0 if where.dp else 6, LABELS)
    made.close()
    losses = max(abs(loss - right) for (loss, _), right in zip(steps, wanted.losses))
    norms = max(abs(norm / right - 1) for (_, norm), right in zip(steps, wanted.norms))
    return Seen(values, gradients, losses, norms, off, head, resumed, exported, judged)


def work(rank: int, processes: int, folder: Path, cases: list[tuple[str, dict[str, Any]]]) -> None:
    """On each of some processes: every case, with process groups of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{processes}", rank=rank,
                            world_size=processes)  # fmt: skip
    seen = []
    for number, (name, options) in enumerate(cases):
        aside = folder / f"case-{processes}-{number}"
        aside.mkdir(exist_ok=True)
        wanted = Expected(*torch.load(folder / f"{name}.pt", weights_only=False))
        seen.append(tuple(compare(folder / f"{name}-critic", folder / f"{name}-judge", aside, wanted, rank=rank,
                                  world_size=processes, **options)))  # fmt: skip
    torch.save(seen, folder / f"seen-{processes}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
