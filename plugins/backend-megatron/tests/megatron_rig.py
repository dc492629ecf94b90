"""Tiny models, ragged micro-batches, and the same mathematics in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tokenizers import Tokenizer as WordTokenizer
from tokenizers import models as tokenizer_models
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers import models as transformers_models

from drivetrain_backend_megatron import build, cpu, families, gradients, packing, parallel, pipeline, weights
from drivetrain_backend_megatron.config import MegatronConfig

CPU = torch.device("cpu")
VOCAB = 51  # odd, so that two ranks have to pad it
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.15, "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
}  # fmt: skip


def write_model(name: str, folder: Path, **other: Any) -> Path:
    """A random model, in several files of safetensors; ``other`` are entries of its config."""
    family, options = FAMILIES[name]
    torch.manual_seed(3)
    config = getattr(transformers_models, f"{family}Config")(**SMALL | options | other)
    model = getattr(transformers_models, f"{family}ForCausalLM")(config)
    with torch.no_grad():  # norms and biases that differ from one another, so that a mix-up shows
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder


def write_tokenizer(folder: Path) -> None:
    """One of words w0, w1 and so on."""
    inner = WordTokenizer(tokenizer_models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", eos_token="w2").save_pretrained(folder)


# Of each data parallel rank four micro-batches of the lengths of their sequences, whose sums do not divide by two
LENGTHS = ((7, 12, 4), (5,), (3, 3, 9), (11, 2)), ((1, 8), (13,), (6, 4, 1), (9,))


def micro_batches(dp: int) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Those of a data parallel rank."""
    random = torch.Generator().manual_seed(dp)
    return [(torch.randint(0, VOCAB, (sum(lengths),), generator=random), lengths) for lengths in LENGTHS[dp]]


def coefficients(dp: int, number: int, tokens: int) -> Tensor:
    """``(tokens, VOCAB)`` the derivative of a loss by the logits of a micro-batch."""
    return torch.randn(tokens, VOCAB, generator=torch.Generator().manual_seed(100 + 10 * dp + number)) / 10


class Reference(NamedTuple):
    """What transformers makes of the micro-batches of some data parallel ranks."""

    logits: dict[tuple[int, int], Tensor]  # by rank and micro-batch, (tokens, VOCAB)
    gradients: dict[str, Tensor]  # of the losses of all, under the names of a folder


def reference(folder: Path, ranks: int = 1) -> Reference:
    """In float32, sequence by sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    logits = {}
    for dp in range(ranks):
        for number, (ids, lengths) in enumerate(micro_batches(dp)):
            found = torch.cat([model(sequence[None]).logits[0] for sequence in ids.split(lengths)])
            (found * coefficients(dp, number, len(ids))).sum().backward()
            logits[dp, number] = found.detach()
    return Reference(logits, _on_disk({name: p.grad for name, p in model.named_parameters()}))


def _on_disk(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A mixture's tensors as folders have them."""
    found = {}
    for name, tensor in tensors.items():
        layer = name.partition(".mlp.")[0]
        if name.endswith("mlp.gate.weight"):
            found[f"{layer}.block_sparse_moe.gate.weight"] = tensor
        elif name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                for part, rows in zip(("w1", "w3"), both.chunk(2)):
                    found[f"{layer}.block_sparse_moe.experts.{expert}.{part}.weight"] = rows
        elif name.endswith("experts.down_proj"):
            for expert, rows in enumerate(tensor):
                found[f"{layer}.block_sparse_moe.experts.{expert}.w2.weight"] = rows
        else:
            found[name] = tensor
    return found


class Made(NamedTuple):
    """A model of megatron-core."""

    pieces: list[nn.Module]
    table: dict[str, families.Parameter]


def make(folder: Path, config: MegatronConfig) -> Made:
    """Build and load; inside ``cpu.stand_in()``."""
    hf_config = AutoConfig.from_pretrained(folder)
    entries = hf_config.to_dict()
    kind, shape = families.family(entries), families.Shape.of(entries)
    parallel.initialize(config, communication_backend="gloo", seed=5)
    options = build.transformer_config(config, kind, shape, entries, dtype=torch.float32, device=CPU)
    made = Made(build.build(options, shape, hf_config, CPU), families.parameters(kind, shape))
    weights.load(made.pieces, made.table, folder)
    return made


class Seen(NamedTuple):
    """The largest differences from a reference, on this rank."""

    logits: float
    gradients: float  # over the largest gradient
    weights: bool  # whether what leaves is bit for bit what was read
    micro_batches: int  # that this rank saw logits of


def compare(folder: Path, config: MegatronConfig, expected: Reference) -> Seen:
    """Run a model, and compare all it gives with transformers."""
    with cpu.stand_in():
        made = make(folder, config)
        where = parallel.layout()
        differences = []

        def loss(logits: Tensor, packed: packing.PackedParams, number: int) -> Tensor:
            ids, lengths = micro_batches(where.dp)[number]
            wanted, slope = (_padded(tensor, lengths, packed, where) for tensor in (
                expected.logits[where.dp, number], coefficients(where.dp, number, len(ids))))  # fmt: skip
            real = ~wanted.isnan()
            assert logits.shape == (1, *wanted.shape)
            differences.append(float((logits[0] - wanted)[real].detach().abs().max()))
            return (logits[0][real] * slope[real]).sum()

        with torch.no_grad():
            pipeline.run(made.pieces, micro_batches(where.dp), loss, forward_only=True)
        pipeline.run(gradients.wrapped(made.pieces), micro_batches(where.dp), loss, forward_only=False)
        worst, largest = 0.0, max(float(g.abs().max()) for g in expected.gradients.values())
        for name, parameter in weights.held(made.pieces).items():
            for part in made.table[name].slices(*weights.share(made.table[name])):
                wanted = expected.gradients[part.name].narrow(part.dim, part.start, part.stop - part.start)
                got = parameter.main_grad[part.at : part.at + part.rows]
                worst = max(worst, float((got - wanted).abs().max()))
        return Seen(max(differences, default=0.0), worst / largest, same_weights(folder, made), len(differences))


def _padded(tensor: Tensor, lengths: Any, packed: packing.PackedParams, where: Any) -> Tensor:
    """This rank's share of ``(tokens, VOCAB)``, NaN where there is padding."""
    rows = torch.cat([nn.functional.pad(part, (0, 0, 0, room - len(part)), value=torch.nan)
                      for part, room in zip(tensor.split(list(lengths)), packed.lengths)])  # fmt: skip
    rows = rows[packing.places(packed.lengths, cp=where.cp_size, rank=where.cp)]
    share = -(-VOCAB // where.tp_size)
    rows = nn.functional.pad(rows, (0, share * where.tp_size - VOCAB), value=torch.nan)
    return rows[:, share * where.tp : share * (where.tp + 1)]


def same_weights(folder: Path, made: Made) -> bool:
    """Whether what leaves is what a folder holds."""
    from safetensors.torch import load_file

    stored: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    entries = list(weights.Gatherer(made.pieces, made.table).entries())
    whole = {entry.name: entry.tensor for entry in entries if not entry.alias}
    aliases = {entry.name: entry.alias for entry in entries if entry.alias}
    assert aliases in ({}, {"lm_head.weight": "model.embed_tokens.weight"})
    assert len(whole) + len(aliases) == len(entries)
    return whole.keys() == stored.keys() and all(whole[name].equal(tensor) for name, tensor in stored.items())


def work(rank: int, processes: int, folder: Path, cases: list[tuple[str, dict[str, Any]]]) -> None:
    """On each of some processes: every case, with process groups of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{processes}", rank=rank,
                            world_size=processes)  # fmt: skip
    seen = []
    for name, sizes in cases:
        config = MegatronConfig(**sizes)
        copies = processes // (config.tensor_model_parallel_size * config.pipeline_model_parallel_size
                               * config.context_parallel_size)  # fmt: skip
        expected = torch.load(folder / f"{name}-{copies}.pt", weights_only=False)
        seen.append(compare(folder / name, config, Reference(*expected)))
        layouts: list[Any] = [None] * processes
        dist.all_gather_object(layouts, parallel.layout())
        assert len({(place.dp, place.tp, place.pp, place.cp) for place in layouts}) == processes
        parallel.release()
    torch.save([tuple(found) for found in seen], folder / f"seen-{processes}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
