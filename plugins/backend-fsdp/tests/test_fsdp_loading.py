"""What two ranks load are the weights that one process loads, and each reads what its shards need."""

from pathlib import Path

import fsdp_meshes as meshes
import fsdp_ranks
import fsdp_rig as rig
import pytest
import torch
import torch.multiprocessing as multiprocessing
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)
from transformers.core_model_loading import Chunk, WeightConverter

from drivetrain_backend_fsdp import loading, pieces

FAMILIES = ("llama", "qwen2", "gemma2", "gemma3", "mixtral", "granite")
REFUSED = ("lacking", "misshapen", "lacking_pickled", "two_types")
EXACT = ("llama", "qwen2", "gemma2", "gemma3", "granite", "pieces", "bfloat16", "critic", "mixtral")


def moe(folder: Path) -> Path:
    """Experts that are not as many as divide by two ranks, and a shared one."""
    sizes = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
             "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1}  # fmt: skip
    torch.manual_seed(3)
    Qwen2MoeForCausalLM(Qwen2MoeConfig(**rig.SMALL, **sizes)).save_pretrained(folder)
    rig.tokenizer(folder)
    return folder


def deepseek(folder: Path) -> Path:
    """A router whose correction, a buffer, stays in float32, as does its weight."""
    sizes = {"num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
             "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
             "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}  # fmt: skip
    torch.manual_seed(3)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**rig.SMALL | sizes))
    for name, buffer in model.named_buffers():
        if "correction" in name:
            buffer.copy_(torch.randn_like(buffer))
    model.save_pretrained(folder)
    rig.tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Path, dict]]:
    root = tmp_path_factory.mktemp("models")
    folders = {family: rig.write_model(family, root / family) for family in FAMILIES}
    cases: list[tuple[str, Path, dict]] = [(family, path, {}) for family, path in folders.items()]
    model = AutoModelForCausalLM.from_pretrained(folders["qwen2"])

    parts = meshes.copy(folders["qwen2"], root / "pieces")
    model.save_pretrained(parts, max_shard_size="20KB")
    assert len(list(parts.glob("*.safetensors"))) > 1
    cases.append(("pieces", parts, {}))
    cases.append(("moe", moe(root / "moe"), {}))
    cases.append(("deepseek", deepseek(root / "deepseek"), {}))
    cases.append(("two_types", root / "deepseek", {"model": {"dtype": "bfloat16"}}))
    cases.append(("bfloat16", folders["qwen2"], {"model": {"dtype": "bfloat16"}}))
    cases.append(("critic", folders["qwen2"], {"role": "critic"}))
    cases.append(("random_bfloat16", folders["qwen2"], {"model": {"dtype": "bfloat16", "init": "random"}}))
    cases.append(("random", folders["mixtral"], {"model": {"init": "random"}}))
    cases.append(("random_critic", folders["gemma3"], {"model": {"init": "random"}, "role": "critic"}))

    weights = load_file(folders["qwen2"] / "model.safetensors")
    pickled = meshes.copy(folders["qwen2"], root / "pickled")
    torch.save(weights, pickled / "pytorch_model.bin")
    cases.append(("pickled", pickled, {}))
    untied = meshes.copy(folders["qwen2"], root / "untied")
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"] * 2}, untied / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    cases.append(("untied", untied, {}))
    doubled = meshes.copy(folders["qwen2"], root / "doubled")
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone(), "unused": torch.ones(3)},
              doubled / "model.safetensors", {"format": "pt"})  # fmt: skip
    cases.append(("doubled", doubled, {}))

    lacking = meshes.copy(folders["qwen2"], root / "lacking")
    save_file({name: tensor for name, tensor in weights.items() if "q_proj" not in name},
              lacking / "model.safetensors", {"format": "pt"})  # fmt: skip
    cases.append(("lacking", lacking, {}))
    misshapen = meshes.copy(folders["qwen2"], root / "misshapen")
    save_file(weights | {"model.norm.weight": torch.ones(5)}, misshapen / "model.safetensors", {"format": "pt"})
    cases.append(("misshapen", misshapen, {}))
    lacking_pickled = meshes.copy(folders["qwen2"], root / "lacking_pickled")
    torch.save({name: tensor for name, tensor in weights.items() if "q_proj" not in name},
               lacking_pickled / "pytorch_model.bin")  # fmt: skip
    cases.append(("lacking_pickled", lacking_pickled, {}))
    return cases


@pytest.fixture(scope="module")
def ranks(cases: list, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("two")
    multiprocessing.spawn(meshes.loaded, (cases, folder), nprocs=2)
    return [torch.load(folder / f"seen-{rank}.pt") for rank in range(2)]


def test_weights_are_those_of_one_process(cases: list, ranks: list[dict]) -> None:
    for name, path, options in cases:
        if isinstance(ranks[0][name], str):
            assert name in REFUSED, ranks[0][name]
            continue
        one = meshes.alone(path, options)
        for rank in ranks:
            for kind in ("weights", "buffers", "sent"):
                assert rank[name][kind].keys() == one[kind].keys(), (name, kind)
                for key, tensor in one[kind].items():
                    assert rank[name][kind][key].equal(tensor), (name, key)
                    assert rank[name][kind][key].dtype == tensor.dtype


def test_shards_of_the_ranks_make_the_whole(cases: list, ranks: list[dict]) -> None:
    whole = set()
    for name, *_ in cases:
        if isinstance(ranks[0][name], str):
            continue
        lent, split = fsdp_ranks.joined([rank[name]["shards"] for rank in ranks])
        assert lent.keys() == ranks[0][name]["sent"].keys()
        assert all(tensor.equal(ranks[0][name]["sent"][key]) for key, tensor in lent.items()), name
        if split < len(lent):
            whole.add(name)
        assert split > 0 or name in whole
    assert whole and len(whole) < len(cases) / 2  # experts that are one tensor in memory and many in a folder


def test_a_rank_reads_what_its_shards_need(cases: list, ranks: list[dict]) -> None:
    for name in EXACT:
        for rank in ranks:
            read, held = rank[name]["read"], rank[name]["held"]
            if name == "bfloat16":  # of a folder in float32
                held *= 2
            if name == "critic":  # its head of 33 numbers is drawn
                assert 0 <= held - read <= 4 * 33
            else:
                assert read == held, name
        total = sum(rank[name]["held"] for rank in ranks)
        assert max(rank[name]["held"] for rank in ranks) < 0.6 * total
    assert ranks[0]["moe"]["read"] == ranks[0]["moe"]["held"] > ranks[1]["moe"]["read"] == ranks[1]["moe"]["held"]
    assert all(rank[name]["read"] == 0 for rank in ranks for name in ("random", "pickled"))


def test_a_skeleton_has_no_memory(cases: list) -> None:
    path = cases[0][1]
    options = {"dtype": torch.bfloat16, "trust_remote_code": False}
    model = loading.skeleton(AutoModelForCausalLM, path, AutoConfig.from_pretrained(path), options)
    assert all(parameter.is_meta and parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert not any(parameter.is_meta for parameter in torch.nn.Linear(2, 2).parameters())  # elsewhere nothing changes


def test_folders_that_do_not_fit(ranks: list[dict]) -> None:
    for rank in ranks:
        assert "has weights in torch.bfloat16 and torch.float32" in rank["two_types"]
        assert "set it to float32" in rank["two_types"]
        assert "lacks 4 weights, first 'model.layers.0.self_attn.q_proj.bias'" in rank["lacking"]
        assert "lacks 4 weights" in rank["lacking_pickled"]
        assert "model.norm.weight has the shape [5]" in rank["misshapen"] and "[32] in the model" in rank["misshapen"]


def test_a_conversion_that_is_no_stack_reads_whole(tmp_path: Path) -> None:
    """One tensor on disk that makes several in memory: each rank's rows of each come out."""
    weights = torch.arange(12.0).reshape(6, 2)
    save_file({"qkv.weight": weights}, tmp_path / "model.safetensors")
    file = safe_open(tmp_path / "model.safetensors", framework="pt").__enter__()
    model = rig.plain(rig.write_model("llama", tmp_path / "llama"))
    converter = WeightConverter(["qkv"], ["q", "k", "v"], [Chunk(dim=0)])
    piece = pieces.Converted(model, converter, "q.weight", torch.Size([2, 2]),
                              sources=[("qkv", "qkv.weight", file.get_slice("qkv.weight"))])  # fmt: skip
    piece.names = piece.names_made()
    rows = piece.rows([(0, 1), (1, 2), (2, 2)], torch.device("cpu"))
    assert piece.names == ["q.weight", "k.weight", "v.weight"]
    assert [part.tolist() for part in rows] == [[[0.0, 1.0]], [[6.0, 7.0]], []]
