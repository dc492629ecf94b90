"""A causal language model of transformers, made ready to train on packed sequences."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from drivetrain import UserError
from drivetrain_backend_common.judges import has_value_head
from drivetrain_backend_common.log_probs import Head
from drivetrain_backend_fsdp import attention, critic, loading
from drivetrain_backend_fsdp.packing import Packed

if TYPE_CHECKING:
    from drivetrain import BackendContext
    from drivetrain_backend_common.attention_kernels import Kernel
    from drivetrain_backend_fsdp.ulysses import SequenceRanks

Consumer = Callable[[Tensor, Head | nn.Linear], Any]
"""Takes the hidden states ``(wanted, hidden)`` that predict the wanted tokens, and the head: a critic's is a layer."""


def load(context: BackendContext, kernel: type[Kernel]) -> PreTrainedModel:
    """Read the model that ``context.model`` describes, or draw its weights from the run's seed; on the host.

    Attention over packed sequences is by ``kernel``. For the role ``critic`` it is the model's trunk with a value head.
    With several ranks it has no memory yet: :func:`drivetrain_backend_fsdp.loading.fill` gives it that, and weights,
    once it is sharded.

    Raises:
        drivetrain.UserError: when the folder is missing, is no causal language model or lacks weights, or the
            hardware does not train in the dtype.
    """
    model, where = context.model, "model.path"
    check_folder(context, "model")
    attention.register()
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    values = context.role == "critic"
    try:
        config = AutoConfig.from_pretrained(model.path, **options)
        options |= {"dtype": getattr(torch, model.dtype), "attn_implementation": attention.NAME}
        kind = critic.model_class(config) if values else AutoModelForCausalLM
        whole = partial(_whole, context, kind, config, options)
        if context.world_size == 1:
            loaded = whole()
        else:
            loaded = loading.skeleton(kind, model.path, config, options)
            if model.init == "random" or not loading.has_slices(model.path, config):
                loading.plan_broadcast(loaded, whole, context.rank)
            else:
                missing = loading.plan_slices(loaded, model.path, context.rank)
                if values and not has_value_head(config):
                    drawn = critic.drawn_head(loaded, missing, context.seed)
                    loading.plan_given(loaded, drawn)
                    missing -= drawn.keys()
                _refuse(missing, context)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{model.path} does not load as a causal language model: {error}", where=where,
                        mend="give the folder of a Hugging Face model with its weights, or set model.init=random",
                        ) from error  # fmt: skip
    if not isinstance(critic.value_head(loaded) if values else loaded.get_output_embeddings(), nn.Linear):
        raise UserError(f"{type(loaded).__name__} has no linear output layer", where=where)
    loaded.eval()  # dropout would make the policy that learns another one than the policy that sampled
    cast(Any, loaded).packed_forward = types.MethodType(_packed_forward, loaded)
    cast(Any, loaded).packed_kernel = kernel
    return loaded


def _whole(context: BackendContext, kind: Any, config: PreTrainedConfig, options: dict[str, Any]) -> PreTrainedModel:
    """The model, read or drawn by this process alone."""
    model, values = context.model, context.role == "critic"
    draws_head = values and not has_value_head(config)
    if model.init == "random":
        with torch.random.fork_rng():
            torch.manual_seed(context.seed)
            loaded = cast(Any, kind.from_config(config, **options))
        if values:
            critic.draw_head(loaded, set(dict(loaded.named_parameters())), context.seed)
        elif (model.path / "generation_config.json").is_file():
            loaded.generation_config = GenerationConfig.from_pretrained(model.path)
        return cast(PreTrainedModel, loaded)
    with critic.head_may_be_missing() if draws_head else nullcontext():
        loaded, report = kind.from_pretrained(model.path, **options, config=config, output_loading_info=True)
    missing = set(report["missing_keys"])
    _refuse(critic.draw_head(loaded, missing, context.seed) if draws_head else missing, context)
    return cast(PreTrainedModel, loaded)


def _refuse(missing: Collection[str], context: BackendContext) -> None:
    if missing:
        raise UserError(f"{context.model.path} lacks {len(missing)} weights, first {min(missing)!r}",
                        where="model.path", mend="export the whole model, or set model.init=random")  # fmt: skip


def check_folder(context: BackendContext, where: str) -> None:
    """Raise UserError when there is no model, or the hardware does not compute in its dtype; ``where`` is its key."""
    model = context.model
    if model.dtype not in context.hardware.dtypes():
        raise UserError(f"{context.hardware.device_type} does not train in {model.dtype}", where=f"{where}.dtype",
                        mend=f"choose from {', '.join(context.hardware.dtypes())}")  # fmt: skip
    if not (model.path / "config.json").is_file():
        what = "has no config.json" if model.path.is_dir() else "is no folder"
        raise UserError(f"{model.path} {what}", where=f"{where}.path", mend="give the folder of a Hugging Face model")


def body(model: PreTrainedModel) -> nn.Module:
    """What turns tokens into hidden states; some families put it elsewhere than where they say."""
    return cast(nn.Module, model.base_model if model.base_model is not model else cast(Any, model).model)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks that transformers says must not be split."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def head(model: PreTrainedModel) -> Head:
    """The output layer, with what the known families do to logits after it."""
    config = model.config.get_text_config()
    output = cast(nn.Linear, model.get_output_embeddings())
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere multiplies, Granite divides
    scale /= getattr(config, "logits_scaling", None) or 1.0
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(weight=output.weight, bias=output.bias, scale=scale, softcap=softcap)


def _packed_forward(self: PreTrainedModel, packed: Packed, consume: Consumer) -> Any:
    """Run packed tokens and give the consumer the hidden states that predict the wanted tokens.

    A method of the model, so that sharding gathers what it needs around it.
    """
    kernel = cast("type[Kernel]", self.packed_kernel)(packed.lengths, packed.input_ids.device)
    with attention.packed(attention.Packing(kernel, packed.lengths[0], packed.ranks)):
        outputs = body(self)(input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False)
    hidden = outputs.last_hidden_state[0].index_select(0, packed.predictor)
    return consume(hidden, critic.value_head(self) or head(self))


@torch.no_grad()
def verify(model: PreTrainedModel, device: torch.device, ranks: SequenceRanks | None = None) -> None:
    """Compare the packed path with the model's own, on two short sequences; where ranks share them, the first lies on
    several ranks.

    Raises:
        drivetrain.UserError: when they differ, as they do where a model's layers look across packed sequences or, but
            in attention, at tokens of another rank, or where it does something to logits that :func:`head` does not
            know.
    """
    vocab = model.config.get_text_config().vocab_size
    lengths = (10, 6)
    everything = torch.arange(16, device=device)
    ids = (everything * 7 + 3).remainder(vocab)
    packed = Packed(
        input_ids=ids[None], position_ids=torch.where(everything < 10, everything, everything - 10)[None],
        lengths=lengths, predictor=everything, target=everything, row=everything, column=everything,
    )  # fmt: skip
    packed = packed if ranks is None else ranks.cut(packed)
    values = critic.value_head(model) is not None
    ours, dtype = cast(Any, model).packed_forward(packed, _exact)
    ours = ours if ranks is None else ranks.gather({"logits": ours}, packed)["logits"]
    model.set_attn_implementation("eager")
    own = torch.cat([model(input_ids=row[None], use_cache=False).logits[0].float() for row in ids.split(lengths)])
    model.set_attn_implementation(attention.NAME)
    errors = [_differences(a, b, values) for a, b in zip(ours.split(lengths), own.split(lengths), strict=True)]
    if dtype == torch.float32:
        differ = max(float(error.max()) for error in errors) > 1e-3
    else:  # rounding may send a token to another expert
        if ranks is not None and not values:  # the tokens that do not lie where their sequence begins
            errors.append(errors[0][packed.input_ids.shape[1] :])
        differ = max(float(error.median()) for error in errors) > 0.1
    if differ:
        shared = "" if ranks is None else f" shared by {ranks.size} ranks"
        raise UserError(
            f"{type(model).__name__} on packed sequences{shared} gives other logits than by itself"
            f" (relative difference {float(torch.cat(errors).max()):.2g})",
            where="backend fsdp", mend="train a model of another family, or with another backend",
        )  # fmt: skip


def _exact(hidden: Tensor, head: Head | nn.Linear) -> tuple[Tensor, torch.dtype]:
    """Logits or values in the type of the head, and the type that the layers computed in."""
    kind, dtype = hidden.device.type, head.weight.dtype
    computed = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
    with torch.autocast(kind, enabled=False):
        if isinstance(head, nn.Linear):
            return critic.values_of(hidden, head), computed
        return head.logits(hidden.to(dtype)), computed


def _differences(ours: Tensor, own: Tensor, values: bool) -> Tensor:
    """Relative, of the logits of each token of a sequence; of its values together, for there is one a token."""
    ours, own = (logits.reshape(1 if values else len(own), -1) for logits in (ours, own))
    ours, own = (logits - logits.mean(dim=-1, keepdim=True) for logits in (ours, own))
    difference: Tensor = (ours - own).norm(dim=-1) / own.norm(dim=-1).clamp(min=1e-6)
    return difference
