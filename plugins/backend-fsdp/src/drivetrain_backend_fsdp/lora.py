"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) on linear layers of the decoder, by peft.

    y = x W^T + alpha / rank * x A^T B^T

The weight W is frozen. A and B are float32; B starts at 0, so that training starts with the model as it was. Where W
is asked for, ``W + alpha / rank * B A`` is computed beside it: no weight is changed, so none has to be changed back.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from drivetrain import CheckpointError, UserError
from drivetrain.seeds import derive_seed
from drivetrain.weights import WeightEntry, fingerprint
from drivetrain_backend_common.folders import complete
from drivetrain_backend_fsdp import loading
from drivetrain_backend_fsdp.config import INSTALL_LORA
from drivetrain_backend_fsdp.critic import value_head
from drivetrain_backend_fsdp.sharding import local, whole

if TYPE_CHECKING:
    from drivetrain import ModelConfig
    from drivetrain_backend_fsdp.config import LoRAConfig

NAME = "default"
"""Of the adapter, where peft keeps several."""


def attach(model: PreTrainedModel, blocks: Iterable[nn.Module], config: LoRAConfig, *, role: str, seed: int) -> None:
    """Put an adapter on linear layers of these blocks, its A drawn from the seed; nothing but it learns.

    A critic's value head learns too.

    Raises:
        drivetrain.UserError: when peft is missing, or the blocks have no linear layer of a name that the config gives.
    """
    where = f"{role}.backend.lora"
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(f"adapters need peft, which does not import: {error}", where=where,
                        mend=INSTALL_LORA) from error  # fmt: skip
    targets = _targets(model, blocks, config, where)
    head = value_head(model)
    kind = "CAUSAL_LM" if head is None else "TOKEN_CLS"
    with torch.random.fork_rng():
        inject_adapter_in_model(
            LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets, task_type=kind), model
        )
        drawn = _drawn(model, derive_seed(seed, "lora", role))
    if any(model.get_parameter(name).is_meta for name in drawn):  # as the model beneath, which is filled later
        loading.plan_given(model, drawn)
    else:
        for name, tensor in drawn.items():
            model.get_parameter(name).data.copy_(tensor)
    if head is not None:
        head.requires_grad_(True)


def _drawn(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """What the adapter starts from, in float32 on the host: A as peft draws it, B zero. Makes the adapter float32."""
    torch.manual_seed(seed)
    drawn = {}
    for name, layer in layers(model).items():
        for part in (layer.lora_A, layer.lora_B):
            part.float()
        a = torch.empty(layer.lora_A[NAME].weight.shape)
        drawn[f"{name}.lora_A.{NAME}.weight"] = nn.init.kaiming_uniform_(a, a=math.sqrt(5))
        drawn[f"{name}.lora_B.{NAME}.weight"] = torch.zeros(layer.lora_B[NAME].weight.shape)
    return drawn


def _targets(model: nn.Module, blocks: Iterable[nn.Module], config: LoRAConfig, where: str) -> list[str]:
    """Names of the layers that get an adapter."""
    inside = {id(module) for block in blocks for module in block.modules()}
    linear = [n for n, module in model.named_modules() if isinstance(module, nn.Linear) and id(module) in inside]
    if not linear:
        raise UserError(f"the decoder layers of {type(model).__name__} hold no linear layer", where=where,
                        mend="train all weights: remove lora")  # fmt: skip
    if config.targets == "all-linear":
        return linear
    for target in config.targets:
        if not any(_is_called(name, target) for name in linear):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise UserError(f"the decoder layers have no linear layer {target!r}", where=f"{where}.targets",
                            mend=f"choose from {known}; the output layer has no adapter")  # fmt: skip
    return [name for name in linear if any(_is_called(name, target) for target in config.targets)]


def _is_called(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def layers(model: nn.Module) -> dict[str, Any]:
    """The layers that have an adapter, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Leave the adapter out, so that the model is what it was before training.

    peft's own switch would also change ``requires_grad``, which parameters that are gathered from shards take over.
    """
    adapted = layers(model).values()
    for layer in adapted:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in adapted:
            layer._disable_adapters = False


@torch.no_grad()
def merged(layer: Any, part: Callable[[Tensor], Tensor] = whole) -> Tensor:
    """The weight, or this part of its rows, with the adapter in it, in the weight's dtype.

    A collective call where the layer is sharded.
    """
    weight, b = part(layer.base_layer.weight), part(layer.lora_B[NAME].weight)
    a = whole(layer.lora_A[NAME].weight)
    return torch.addmm(weight.float(), b, a, alpha=layer.scaling[NAME]).to(weight.dtype)


def without_adapter(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor, Callable[[Callable[[Tensor], Tensor]], Tensor]]]:
    """A model's tensors under the names that they have in a model without adapter, and what gives each.

    That takes what a sharded tensor is made into, the whole of it or a part of its rows. The adapter's own are left
    out, for it is merged into the weights beneath.
    """
    adapted = layers(model)
    for name, tensor in tensors:
        owner, _, rest = name.rpartition(".base_layer.")
        if owner in adapted:
            yield f"{owner}.{rest}", tensor, partial(merged, adapted[owner]) if rest == "weight" else _given(tensor)
        elif name.rsplit(".", 3)[0] not in adapted:
            yield name, tensor, _given(tensor)


def _given(tensor: Tensor) -> Callable[[Callable[[Tensor], Tensor]], Tensor]:
    return lambda part: part(tensor)


@torch.no_grad()
def entries(model: nn.Module) -> Iterator[WeightEntry]:
    """A and B of each layer, gathered one by one, under the names of peft's files; B times the adapter's scale.

    A collective call where the model is sharded.
    """
    for name, layer in layers(model).items():
        a, b = whole(layer.lora_A[NAME].weight), whole(layer.lora_B[NAME].weight)
        yield WeightEntry.whole(f"base_model.model.{name}.lora_A.weight", a)
        yield WeightEntry.whole(f"base_model.model.{name}.lora_B.weight", b * layer.scaling[NAME])


def export(model: PreTrainedModel, config: ModelConfig, folder: Path, *, rank: int) -> None:
    """Write the adapter, and a critic's value head, as a folder of peft's; it appears whole or not at all.

    A collective call where the model is sharded.
    """
    learnt = {name: whole(p) for name, p in model.named_parameters() if p.requires_grad}
    if rank:
        return
    about: Any = copy.copy(model.peft_config[NAME])
    about.base_model_name_or_path = str(config.path)
    about.inference_mode = True
    head = value_head(model)
    about.modules_to_save = None if head is None else [n for n, module in model.named_modules() if module is head]
    with complete(folder) as aside:
        about.save_pretrained(str(aside))
        tensors = {f"base_model.model.{n.replace(f'.{NAME}.', '.')}": t.cpu().contiguous() for n, t in learnt.items()}
        save_file(tensors, aside / "adapter_model.safetensors", metadata={"format": "pt"})


def identity(model: nn.Module) -> dict[str, Any] | None:
    """What the state of an adapter is worth nothing without, on rank 0; None where there is no adapter.

    Returns:
        the layers that have one, its scale, and a digest of the frozen weights: of their names, shapes, dtypes and
        first rows, which rank 0 has however they are sharded.
    """
    adapted = layers(model)
    if not adapted:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            part, _ = local(parameter)
            digest.update(f"{name}{tuple(parameter.shape)}{fingerprint(part[:1] if part.dim() else part)}".encode())
    scale = next(iter(adapted.values())).scaling[NAME]
    return {"base": digest.hexdigest(), "scale": scale, "layers": sorted(adapted)}


def check_identity(model: nn.Module, stored: dict[str, Any] | None, folder: Path) -> None:
    """Refuse a state that was written for another base or adapter; for rank 0.

    Raises:
        drivetrain.CheckpointError: saying what differs.
    """
    own = identity(model)
    if (own is None) != (stored is None):
        held, wanted = ("an adapter", "has none") if own is None else ("no adapter", "has one")
        raise CheckpointError(f"the checkpoint holds {held}; the model {wanted}", where=str(folder),
                              mend="resume with backend.lora as it was")  # fmt: skip
    if own is None or stored is None:
        return
    for key, what in (("layers", "sits on other layers"), ("scale", "has another alpha / rank"),
                      ("base", "was trained on other weights than the model's")):  # fmt: skip
        if own[key] != stored[key]:
            raise CheckpointError(f"the adapter of the checkpoint {what}", where=str(folder),
                                  mend="resume with the model.path and backend.lora that it was saved with",
                                  )  # fmt: skip
