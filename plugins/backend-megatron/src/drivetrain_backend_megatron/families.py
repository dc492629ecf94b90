"""Families: how megatron-core's parameters are made of the tensors of a Hugging Face folder. Imports no torch.

Every parameter of a rank is some slices of a folder's tensors, one below the other. That serves both ways: a rank reads
these slices, and whoever has the parameters of all ranks puts the slices back into whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from drivetrain import ModelFamilySpec, PluginError, UserError, get_registry


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A part of a tensor of a folder: from ``start`` to ``stop`` along ``dim``.

    Attributes:
        name, shape: of the whole tensor.
        at: the row of the rank's parameter where the slice begins.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int
    at: int

    @property
    def rows(self) -> int:
        """Rows of the rank's parameter that the slice fills."""
        return self.stop - self.start if self.dim == 0 else self.shape[0]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of the whole model.

    Attributes:
        tensors: names and shapes of the folder's tensors that it is made of.
        split: what ranks of tensor parallelism have shares of. ``rows``: of each tensor; what is missing in the shares
            of the last ranks is padding. ``columns``: of the one tensor. ``groups``: key-value groups, each with the
            rows of its queries, of its key and of its value. ``none``: every rank has it all.
        groups: key-value groups of the model.
        expert: whether the ranks are those of expert tensor parallelism.
        tied: the name of another parameter that this one is a copy of.
    """

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    split: Literal["none", "rows", "columns", "groups"] = "none"
    groups: int = 1
    expert: bool = False
    tied: str | None = None

    def slices(self, index: int, count: int) -> Iterator[Slice]:
        """What a rank of ``count`` has, in order."""
        if self.split == "none":
            index, count = 0, 1
        dim = int(self.split == "columns")
        repeats = self.groups // count if self.split == "groups" else 1
        at = 0
        for part in range(index * repeats, (index + 1) * repeats):
            for name, shape in self.tensors:
                size = -(-shape[dim] // (count * repeats))
                start = min(part * size, shape[dim])
                piece = Slice(name=name, shape=shape, dim=dim, start=start, stop=min(start + size, shape[dim]), at=at)
                at += piece.rows
                yield piece


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model, from its Hugging Face config."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    width: int  # of the feed-forward layer, or of each expert
    vocab: int
    tied: bool
    experts: int = 0
    labels: int = 0  # of the linear layer ``score`` in place of the output layer; 0: there is none
    label_bias: bool = False

    @classmethod
    def of(cls, model: Mapping[str, Any], *, labels: int = 0, label_bias: bool = False) -> Shape:
        """Read the sizes from the entries of a config."""
        heads = model["num_attention_heads"]
        return cls(
            layers=model["num_hidden_layers"],
            hidden=model["hidden_size"],
            heads=heads,
            groups=model.get("num_key_value_heads") or heads,
            head_dim=model.get("head_dim") or model["hidden_size"] // heads,
            width=model["intermediate_size"],
            vocab=model["vocab_size"],
            tied=bool(model.get("tie_word_embeddings")) and not labels,
            experts=model.get("num_local_experts") or 0,
            labels=labels,
            label_bias=label_bias,
        )


@dataclass(frozen=True, kw_only=True)
class Family:
    """What tells a family from Llama; what a plugin offers with ``drivetrain_model_families``.

    Attributes:
        qkv_bias: whether queries, keys and values have biases.
        qk_norm: whether queries and keys are normed head by head.
        router, expert: names of the router and of an expert's gate, up and down projections, in a layer.
        must_be: entries of a config that the model has no other form for, where they are there at all.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    router: str = ""
    expert: tuple[str, str, str] | None = None
    must_be: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


FUSED = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Norms that TransformerEngine has within the linear layers behind them, and the names of these norms elsewhere."""

_PLAIN = {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,), "attention_dropout": (0, 0.0)}
LLAMA = Family(must_be={**_PLAIN, "pretraining_tp": (1,)})
QWEN2 = Family(qkv_bias=True, must_be={**_PLAIN, "use_sliding_window": (False,)})
QWEN3 = Family(qk_norm=True, must_be={**_PLAIN, "use_sliding_window": (False,)})
MIXTRAL = Family(
    router="block_sparse_moe.gate.weight",
    expert=("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight",
            "block_sparse_moe.experts.{}.w2.weight"),
    must_be={**_PLAIN, "sliding_window": (None,), "router_jitter_noise": (0, 0.0)},
)  # fmt: skip


def family(model: Mapping[str, Any]) -> Family:
    """The family of a Hugging Face config, among those that plugins offer to the backend ``megatron``.

    Raises:
        drivetrain.UserError: no family has the model, or several, or the model has something that its own does not
            support.
        drivetrain.PluginError: the family cannot be had.
    """
    registry, kind = get_registry(), model["model_type"]
    specs = [offer.spec for offers in registry.offers.values() for offer in offers]
    ours = [spec for spec in specs if isinstance(spec, ModelFamilySpec) and spec.backend == "megatron"]
    names = sorted({spec.name for spec in ours if kind in spec.model_types})
    if not names:
        known = ", ".join(sorted({known for spec in ours for known in spec.model_types}))
        raise UserError(f"backend megatron does not know models of type {kind!r}", where="model.path",
                        mend=f"use backend fsdp, or a model of one of the types {known}")  # fmt: skip
    if len(names) > 1:
        raise UserError(f"models of type {kind!r} are in several families: {', '.join(names)}", where="model.path",
                        mend="switch a plugin off with DRIVETRAIN_DISABLE, or uninstall it")  # fmt: skip
    found = registry.load("model_families", names[0])
    if not isinstance(found, Family):
        raise PluginError(
            f"model family {names[0]!r} is a {type(found).__name__}, and not a Family of backend megatron"
        )
    for key, allowed in found.must_be.items():
        if model.get(key, allowed[0]) not in allowed:
            raise UserError(f"backend megatron does not support {key}: {model[key]!r} of {kind}", where="model.path",
                            mend="use backend fsdp")  # fmt: skip
    return found


def head(table: Mapping[str, Parameter]) -> dict[str, tuple[int, ...]]:
    """The tensors of a folder that come after the last layer, and their shapes."""
    return {name: shape for ours, parameter in table.items() if ours.startswith("output_layer.")
            for name, shape in parameter.tensors}  # fmt: skip


def parameters(kind: Family, shape: Shape) -> dict[str, Parameter]:
    """All parameters of a model under megatron-core's names, in order.

    Layers and experts count through the whole model, whatever a rank holds.
    """
    table: dict[str, Parameter] = {}

    def add(name: str, *tensors: tuple[str, tuple[int, ...]], **options: Any) -> None:
        table[name] = Parameter(tensors=tensors, **options)

    hidden, width = shape.hidden, shape.width
    queries, keys = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    add("embedding.word_embeddings.weight", ("model.embed_tokens.weight", (shape.vocab, hidden)), split="rows")
    for layer in range(shape.layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        attention = f"{theirs}self_attn."
        add(f"{ours}input_layernorm.weight", (f"{theirs}input_layernorm.weight", (hidden,)))
        heads = [("q", queries), ("k", keys), ("v", keys)]
        add(f"{ours}self_attention.linear_qkv.weight",
            *((f"{attention}{part}_proj.weight", (rows, hidden)) for part, rows in heads),
            split="groups", groups=shape.groups)  # fmt: skip
        if kind.qkv_bias:
            add(f"{ours}self_attention.linear_qkv.bias",
                *((f"{attention}{part}_proj.bias", (rows,)) for part, rows in heads),
                split="groups", groups=shape.groups)  # fmt: skip
        if kind.qk_norm:
            for part in "qk":
                add(f"{ours}self_attention.{part}_layernorm.weight",
                    (f"{attention}{part}_norm.weight", (shape.head_dim,)))  # fmt: skip
        add(f"{ours}self_attention.linear_proj.weight", (f"{attention}o_proj.weight", (hidden, queries)),
            split="columns")  # fmt: skip
        add(f"{ours}pre_mlp_layernorm.weight", (f"{theirs}post_attention_layernorm.weight", (hidden,)))
        if kind.expert is None:
            blocks = [(f"{ours}mlp.", *(f"{theirs}mlp.{part}_proj.weight" for part in ("gate", "up", "down")))]
        else:
            add(f"{ours}mlp.router.weight", (f"{theirs}{kind.router}", (shape.experts, hidden)))
            blocks = [(f"{ours}mlp.experts.local_experts.{expert}.", *(theirs + name.format(expert)
                       for name in kind.expert)) for expert in range(shape.experts)]  # fmt: skip
        for block, gate, up, down in blocks:
            expert = kind.expert is not None
            add(f"{block}linear_fc1.weight", (gate, (width, hidden)), (up, (width, hidden)), split="rows",
                expert=expert)  # fmt: skip
            add(f"{block}linear_fc2.weight", (down, (hidden, width)), split="columns", expert=expert)
    add("decoder.final_layernorm.weight", ("model.norm.weight", (hidden,)))
    if shape.labels:
        add("output_layer.weight", ("score.weight", (shape.labels, hidden)))
        if shape.label_bias:
            add("output_layer.bias", ("score.bias", (shape.labels,)))
    elif shape.tied:
        add("output_layer.weight", ("model.embed_tokens.weight", (shape.vocab, hidden)), split="rows",
            tied="embedding.word_embeddings.weight")  # fmt: skip
    else:
        add("output_layer.weight", ("lm_head.weight", (shape.vocab, hidden)), split="rows")
    return table
