"""Tiny reward models with tokenizers of their own, and their scores by plain calls of transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast
from transformers import models as families

from drivetrain import DataProto, RewardModelWorker
from drivetrain.config import ModelConfig, PluginConfig, RewardModelConfig
from drivetrain_backend_fsdp.config import FSDPConfig

SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789:.\n"
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "initializer_range": 0.3, "vocab_size": 64}  # fmt: skip
DECODER = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 128}
CHAT = (
    "[CLS]{% for m in messages %}{{ m.role }}:{{ m.content }}.{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TEXTS = [("two and two", None, "4"), ("one", None, "a long answer to a short question"), ("", None, "1"),
         ("say no more than is asked of you", None, "ok"), ("x", None, "")]  # fmt: skip


def write_tokenizer(folder: Path, *, chat: bool = False, **options: Any) -> None:
    """Characters; texts begin with [CLS], and each ends with [SEP]."""
    inner = Tokenizer(models.WordLevel({t: i for i, t in enumerate([*SPECIAL, *LETTERS])}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokens = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "eos_token": "[SEP]"}
    made = PreTrainedTokenizerFast(tokenizer_object=inner, **tokens, **options)
    if chat:
        made.chat_template = CHAT
    made.save_pretrained(folder)


def write(family: str, folder: Path, *, labels: int, chat: bool = False, pad: int | None = None) -> Path:
    """A random classifier; decoders know no padding unless ``pad`` is given."""
    torch.manual_seed(11)
    shape = {"Bert": {**SMALL, "max_position_embeddings": 80},
             "Roberta": {**SMALL, "max_position_embeddings": 82, "pad_token_id": 0}}  # fmt: skip
    config = getattr(families, f"{family}Config")(
        **shape.get(family, DECODER | {"pad_token_id": pad}), num_labels=labels
    )
    model = getattr(families, f"{family}ForSequenceClassification")(config)
    model.eval().save_pretrained(folder)
    types = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]} if family == "Bert" else {}
    write_tokenizer(folder, chat=chat, **types)
    return folder


def worker(folder: Path, *, rank: int = 0, world_size: int = 1, backend: dict | None = None, **section: Any) -> Any:
    """A worker of the reward model, ready to judge."""
    judge = RewardModelConfig(
        model=ModelConfig(path=folder, **section.pop("model", {})), backend=FSDPConfig(**(backend or {})), **section
    )
    run = SimpleNamespace(reward_model=judge, hardware=PluginConfig(name="cpu"), trainer=SimpleNamespace(seed=1))
    made = RewardModelWorker(run, "reward", rank=rank, world_size=world_size)
    made.init_model()
    return made


def batch(texts: Any = TEXTS) -> DataProto:
    """The texts, as the driver sends them."""
    return DataProto.from_dict({}, dict(zip(("prompt", "messages", "response"), map(list, zip(*texts)), strict=True)))


def scores(made: Any, texts: Any = TEXTS) -> torch.Tensor:
    return made.compute_rm_score(batch(texts))["rm_scores"]


@torch.no_grad()
def plain_logits(folder: Path, *texts: Any, **options: Any) -> torch.Tensor:
    """``(labels,)`` of one text, or of a pair of them, as transformers computes it by itself."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    encoded = AutoTokenizer.from_pretrained(folder)(*texts, return_tensors="pt", **options)
    if not hasattr(model.config, "type_vocab_size"):
        encoded.pop("token_type_ids", None)
    return model(**encoded).logits[0]


def work(rank: int, llama: Path, bert: Path, folder: Path) -> None:
    """What each of two processes does in test_two_ranks_equal_one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    seen = []
    for path, options in ((llama, {}), (bert, {"label_index": 1, "output": "log_odds"})):
        made = worker(path, rank=rank, world_size=2, backend={"micro_batch_tokens": 30}, **options)
        assert type(next(made.backends["reward"].model.parameters())).__name__ == "DTensor"
        uneven = batch()[slice(0, 4) if rank == 0 else slice(4, 5)]
        seen.append([made.compute_rm_score(part)["rm_scores"] for part in
                     (uneven, batch() if rank == 0 else batch()[5:])])  # fmt: skip
    torch.save(seen, folder / f"seen-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
