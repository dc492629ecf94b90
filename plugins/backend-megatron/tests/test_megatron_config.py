"""What a config refuses, with the arithmetic, before anything starts."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest

from drivetrain import UserError
from drivetrain_backend_megatron.config import MegatronConfig
from drivetrain_backend_megatron.families import Shape, family, parameters

DENSE = {"model_type": "qwen2", "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 12,
         "intermediate_size": 48, "hidden_size": 32, "vocab_size": 50}  # fmt: skip
EXPERTS = {**DENSE, "model_type": "mixtral", "num_local_experts": 4}
TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
VPP, SP = "virtual_pipeline_model_parallel_size", "sequence_parallel"


@pytest.mark.parametrize(
    "sizes, model, key, says",
    [
        ({TP: 3}, {**DENSE, "num_key_value_heads": 3}, TP, "3 does not divide the model's 8 attention heads"),
        ({TP: 4}, DENSE, TP, "4 does not divide the model's 2 key-value heads"),
        ({TP: 4}, {**DENSE, "num_key_value_heads": 4, "intermediate_size": 6}, TP, "6 columns of the feed-forward"),
        ({TP: 4}, {**DENSE, "num_key_value_heads": 4, "vocab_size": 5}, TP, "the last one has none of the model's 5"),
        ({PP: 5}, DENSE, PP, "5 does not divide the model's 12 layers"),
        ({PP: 3, VPP: 3}, DENSE, VPP, "3 does not divide the model's 4 layers of a stage"),
        ({VPP: 2}, DENSE, VPP, "pipeline_model_parallel_size is 1"),
        ({SP: True}, DENSE, SP, "tensor_model_parallel_size is 1"),
        ({EP: 2}, DENSE, EP, "has no experts"),
        ({ETP: 2}, DENSE, ETP, "has no experts"),
        ({EP: 3}, EXPERTS, EP, "3 does not divide the model's 4 experts"),
        ({ETP: 5}, EXPERTS, ETP, "5 does not divide the model's 48 columns of an expert"),
        ({TP: 2}, EXPERTS, SP, "tensor_model_parallel_size 2 need it"),
        ({CP: 2, "attention": "flex"}, DENSE, "attention", "with context_parallel_size 2"),
        ({"recompute_method": "block"}, DENSE, "recompute_method", "recompute_granularity full, not with None"),
        ({"recompute_granularity": "full", "recompute_modules": ["mlp"]}, DENSE, "recompute_modules", "selective"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
            DENSE,
            "recompute_modules",
            "no experts",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
            EXPERTS,
            "recompute_modules",
            "moe in the place of mlp",
        ),
        (
            {PP: 2, VPP: 2, "recompute_granularity": "full", "recompute_num_layers": 2},
            DENSE,
            "recompute_num_layers",
            "2 does not divide the model's 3 layers of a piece",
        ),
        ({"recompute_granularity": "full", "recompute_method": "block"}, EXPERTS, "recompute_method", "are padding"),
        ({"moe_aux_loss_coeff": 0.1}, EXPERTS, "moe_aux_loss_coeff", "it is 0.1 with"),
        ({"moe_router_load_balancing_type": "aux_loss"}, EXPERTS, "moe_aux_loss_coeff", "it is 0 with"),
        ({"moe_z_loss_coeff": 0.1}, DENSE, "moe_z_loss_coeff", "has no experts"),
        (
            {"overlap_param_gather": True, "overlap_grad_reduce": True},
            DENSE,
            "overlap_param_gather",
            "needs use_distributed_optimizer",
        ),
        ({"ddp_bucket_size": 10}, DENSE, "ddp_bucket_size", "needs overlap_grad_reduce"),
        ({TP: 2, PP: 2, CP: 2}, DENSE, "name", "TP x PP x CP is untested for a model without experts"),
        ({PP: 2, VPP: 2}, EXPERTS, "name", "PP x VPP is untested for a model with experts"),
        ({}, {**DENSE, "model_type": "gpt2"}, "name", "types llama, mixtral, qwen2, qwen3"),
        ({}, {**DENSE, "model_type": "llama", "attention_bias": True}, "name", "attention_bias: True of llama"),
        ({}, {**EXPERTS, "sliding_window": 8}, "name", "sliding_window: 8 of mixtral"),
    ],
)
def test_what_does_not_fit_is_refused(sizes: dict[str, Any], model: dict[str, Any], key: str, says: str) -> None:
    config = MegatronConfig(**sizes)
    found = [*config.problems(), *config.model_problems(model)]
    assert [problem.key for problem in found] == [key]
    assert says in found[0].what + found[0].mend and found[0].mend


@pytest.mark.parametrize(
    "sizes, model", [({}, DENSE), ({TP: 2, PP: 3, VPP: 2, SP: True}, DENSE), ({TP: 2, EP: 4, SP: True}, EXPERTS)]
)
def test_what_fits_is_not(sizes: dict[str, Any], model: dict[str, Any]) -> None:
    config = MegatronConfig(**sizes)
    assert not [*config.problems(), *config.model_problems(model)]


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="it is there")
def test_transformer_engine_has_to_be_there() -> None:
    (problem,) = MegatronConfig(transformer_impl="transformer_engine").problems()
    assert problem.key == "transformer_impl" and "not installed here" in problem.what and "local" in problem.mend


@pytest.mark.parametrize(
    "sizes, processes, says",
    [
        ({TP: 2, PP: 2}, 6, "6 processes are not a multiple of tensor 2 x pipeline 2 x context 1 = 4"),
        ({CP: 2}, 3, "3 processes are not a multiple of tensor 1 x pipeline 1 x context 2 = 2"),
        ({EP: 4}, 2, "2 processes are not a multiple of expert tensor 1 x expert 4 x pipeline 1 = 4"),
        ({TP: 2, EP: 2}, 2, "expert tensor 2 x expert 2 x pipeline 1 = 4"),
        ({TP: 2, EP: 2, ETP: 1}, 2, ""),
        ({TP: 2, PP: 2, CP: 2}, 16, ""),
    ],
)
def test_processes_have_to_be_a_multiple(sizes: dict[str, Any], processes: int, says: str) -> None:
    found = MegatronConfig(**sizes).sizes_problem(processes)
    assert says in found if says else not found


def test_the_config_imports_no_engine() -> None:
    code = ("import sys, drivetrain_backend_megatron.config, drivetrain_backend_megatron.plugin;"
            "print({'torch', 'megatron', 'transformers'} & set(sys.modules))")  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen2", "qwen3"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_shares_of_all_ranks_are_every_element_once(name: str, ranks: int) -> None:
    """Rows and columns of the folder's tensors, over the ranks; rows of a rank's parameter without gaps."""
    entries = {**DENSE, "model_type": name, "vocab_size": 51} | ({"num_local_experts": 4} if name == "mixtral" else {})
    table = parameters(family(entries), Shape.of(entries))
    assert len({tensor for parameter in table.values() for tensor, _ in parameter.tensors}) == sum(
        len(parameter.tensors) for parameter in table.values())  # fmt: skip
    for parameter in table.values():
        covered: dict[str, list[int]] = {tensor: [] for tensor, _ in parameter.tensors}
        for rank in range(ranks):
            end = 0
            for part in parameter.slices(rank, ranks):
                assert part.at == end
                end += part.rows
                covered[part.name] += range(part.start, part.stop)
            if parameter.split == "none":
                break
        for tensor, shape in parameter.tensors:
            assert sorted(covered[tensor]) == list(range(shape[int(parameter.split == "columns")]))


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(UserError, match="'gpt2'(?s:.)*llama, mixtral, qwen2, qwen3") as refused:
        family({"model_type": "gpt2"})
    assert refused.value.where == "model.path"
