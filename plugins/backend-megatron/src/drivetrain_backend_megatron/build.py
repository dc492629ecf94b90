"""megatron-core's model for a Hugging Face config: the one place that knows GPTModel and its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drivetrain import UserError
from drivetrain_backend_common.attention_kernels import KERNELS, Kernel
from drivetrain_backend_common.flash import Varlen
from drivetrain_backend_megatron.attention import CoreAttention
from drivetrain_backend_megatron.config import MegatronConfig
from drivetrain_backend_megatron.families import Family, Shape
from drivetrain_backend_megatron.head import Score
from drivetrain_backend_megatron.moe import Balance, Router

ROPE_TYPES = ("default", "linear", "llama3")  # those that change nothing but the frequencies

if not hasattr(moe_utils, "te_general_gemm"):  # read, and not set, where there is no TransformerEngine
    moe_utils.te_general_gemm = None


class RMSNorm(nn.Module):
    """Root mean square norm, whose weight's gradient is summed over the ranks that split the tokens."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Norm the last dimension."""
        return nn.functional.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)


@dataclass
class Options(TransformerConfig):  # type: ignore[misc]
    """megatron-core's options, and ours.

    Attributes:
        attention_kernel: what computes attention over packed sequences.
        balance: of the experts of a mixture.
    """

    attention_kernel: type[Kernel] | None = None
    balance: Balance | None = None


def transformer_config(
    config: MegatronConfig,
    kind: Family,
    shape: Shape,
    model: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device,
    learns: bool = True,
) -> Options:
    """megatron-core's options for a model.

    Gradients are sums: losses are divided by global counts before they come to megatron-core.

    Args:
        model: entries of the Hugging Face config.
        dtype: of weights and activations.
        device: where the model is.
        learns: whether it has a backward pass.

    Raises:
        drivetrain.UserError: the device, or this machine, does not have what the config asks for.
    """
    kernel = KERNELS[config.attention or ("varlen" if Varlen.suits(device, dtype, shape.head_dim) else "sdpa")]
    kernel.check(device, dtype, learns=learns)
    experts: dict[str, Any] = {}
    if shape.experts:
        experts = {
            "num_moe_experts": shape.experts,
            "moe_router_topk": model["num_experts_per_tok"],
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": config.moe_router_dtype,
            "moe_ffn_hidden_size": shape.width,
            "moe_grouped_gemm": False,
            "balance": Balance(shape.layers, shape.experts, aux_coeff=config.moe_aux_loss_coeff,
                               z_coeff=config.moe_z_loss_coeff or 0.0, device=device),
        }  # fmt: skip
    return Options(
        attention_kernel=kernel,
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.width,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=model["rms_norm_eps"],
        qk_layernorm=kind.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=kind.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,  # weights are read
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type=config.moe_token_dispatcher_type,
        transformer_impl=config.transformer_impl,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_size,
        sequence_parallel=config.sequence_parallel,
        **config.recomputation(),
        # with pieces that interleave, two ranks exchange in both directions at a time: each needs messages of its own
        overlap_p2p_comm=config.virtual_pipeline_model_parallel_size is not None,
        batch_p2p_comm=config.virtual_pipeline_model_parallel_size is None,
        **experts,
    )


def build(options: Options, shape: Shape, hf_config: PreTrainedConfig, device: torch.device) -> list[GPTModel]:
    """This rank's pieces of the model, in the order of their layers, with memory for weights but without contents.

    The output layer gives this rank's part of the vocabulary, which is padded to a multiple of the ranks; where the
    shape has labels, it is :class:`head.Score`.

    Raises:
        drivetrain.UserError: for rotary frequencies that are not supported.
    """
    frequencies = _frequencies(hf_config)
    parts = {"num_experts": shape.experts or None, "moe_grouped_gemm": False, "qk_layernorm": options.qk_layernorm}
    local = options.transformer_impl == "local"
    if local:
        layer = get_gpt_layer_local_spec(**parts, normalization="RMSNorm")
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    else:
        layer = get_gpt_layer_with_transformer_engine_spec(**parts)
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = partial(CoreAttention, frequencies=frequencies.to(device))
    if shape.experts:
        mixture = layer.submodules.mlp  # of older releases a spec, of newer ones a function
        parts_of = mixture.keywords["submodules"] if isinstance(mixture, partial) else mixture.submodules
        parts_of.router = Router
    if options.qk_layernorm and local:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    pieces = []
    for stage in range(options.virtual_pipeline_model_parallel_size or 1):
        vp_stage = stage if options.virtual_pipeline_model_parallel_size else None
        layers = get_num_layers_to_build(options, vp_stage)
        with device:  # of what does not say where it wants to be
            piece = GPTModel(
                config=options,
                transformer_layer_spec=TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm),
                vocab_size=-(-shape.vocab // options.tensor_model_parallel_size) * options.tensor_model_parallel_size,
                max_sequence_length=hf_config.max_position_embeddings,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                parallel_output=True,
                share_embeddings_and_output_weights=shape.tied,
                position_embedding_type="none",  # core attention rotates
                vp_stage=vp_stage,
            )
        if shape.labels and piece.post_process:
            with device:
                piece.output_layer = Score(options, shape.labels, bias=shape.label_bias)
        for name, parameter in piece.named_parameters():
            if ".local_experts." in name:  # unsaid with one expert rank, whose gradients tensor ranks may have parts of
                parameter.allreduce = False
        pieces.append(piece)
    return pieces


def _frequencies(hf_config: PreTrainedConfig) -> Tensor:
    """``(head_dim / 2,)`` the rotary frequencies, as transformers computes them."""
    rope = hf_config.rope_parameters
    kind = rope["rope_type"]
    if kind not in ROPE_TYPES:
        raise UserError(f"backend megatron does not support rotary embeddings of the type {kind!r}", where="model.path",
                        mend=f"use backend fsdp; supported are {', '.join(ROPE_TYPES)}")  # fmt: skip
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError("backend megatron does not support rotary embeddings of a part of each head",
                        where="model.path", mend="use backend fsdp")  # fmt: skip
    if kind == "default":
        head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
        powers = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        return torch.as_tensor(1.0 / rope["rope_theta"] ** powers)
    frequencies: Tensor = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))[0]
    return frequencies
