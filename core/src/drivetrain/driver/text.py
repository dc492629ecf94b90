"""Between text and tokens: the tokenizer, decoded responses, and encoded ones for supervised training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.errors import UserError
from drivetrain.protocol import DataProto

if TYPE_CHECKING:
    from collections.abc import Sequence

    from drivetrain.config import ModelConfig


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer in the model's folder. Raises UserError when there is none that loads."""
    from transformers import AutoTokenizer

    folder = config.tokenizer_path
    try:
        # Without files, transformers makes an empty tokenizer of the kind that the model's config.json names.
        if not any(folder.glob("*token*")) and not any(folder.glob("vocab*")):
            raise FileNotFoundError("no tokenizer files" if folder.is_dir() else "no such folder")
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code, local_files_only=True)
    except Exception as error:
        raise UserError(f"cannot load the tokenizer: {error}", where=str(folder),
                        mend="set model.tokenizer to a folder with tokenizer.json") from error  # fmt: skip


def pad_token_id(tokenizer: Any) -> int:
    """The token that fills rows up, else the one that ends a text. Raises UserError when there is neither."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise UserError("the tokenizer has neither a padding nor an end-of-sequence token", where="model.tokenizer",
                    mend="set pad_token in its tokenizer_config.json")  # fmt: skip


def end_of_sequence_ids(folder: Path, tokenizer: Any | None) -> frozenset[int]:
    """End-of-sequence tokens: those of the generation config (else of the model's config) and the tokenizer's."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.exists() else None
        if ids is not None:
            found.update(ids if isinstance(ids, list) else [ids])
            break
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(found)


def padded(rows: Sequence[Sequence[int]], pad: int, *, left: bool) -> tuple[Tensor, Tensor]:
    """``(tokens, mask)``, both int64 ``(batch, longest)``; the mask is 1 where there is a token of a row."""
    width = max((len(row) for row in rows), default=0)
    tokens = torch.full((len(rows), width), pad, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for index, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        tokens[index, place] = torch.tensor(row, dtype=torch.int64)
        mask[index, place] = 1
    return tokens, mask


def response_tokens(batch: DataProto) -> list[list[int]]:
    """The tokens of each row that the policy chose: ``responses`` where ``response_mask`` is 1."""
    mask = batch["response_mask"].bool()
    return [row[chosen].tolist() for row, chosen in zip(batch["responses"], mask, strict=True)]


def decode_responses(batch: DataProto, tokenizer: Any) -> list[str]:
    """The text of each row's response, special tokens left out."""
    return decode_tokens(response_tokens(batch), tokenizer)


def decode_tokens(rows: Sequence[Sequence[int]], tokenizer: Any) -> list[str]:
    """The text of each row of tokens, special ones left out."""
    return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in rows]


class ResponseEncoder:
    """Makes batches of given responses, in the form in which a rollout returns drawn ones."""

    def __init__(self, tokenizer: Any) -> None:
        """Raises UserError when the tokenizer has no end-of-sequence token."""
        if tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no end-of-sequence token to end responses with",
                            where="model.tokenizer", mend="set eos_token in its tokenizer_config.json")  # fmt: skip
        self._tokenizer, self._pad = tokenizer, pad_token_id(tokenizer)

    def respond(self, prompts: DataProto, *columns: str) -> DataProto:
        """Join prompts with their texts, encoded and ended with the end-of-sequence token.

        Args:
            columns: of texts, by default ``response_text`` alone; a prompt gets a row for each, one after the other.

        Returns:
            ``prompts`` ``(batch, prompt)``, ``responses`` and ``response_mask`` ``(batch, response)``; ``input_ids``
            and ``attention_mask`` become ``(batch, prompt + response)``. Raises UserError for a prompt without text.
        """
        columns = columns or ("response_text",)
        batch, rows = prompts.repeat(len(columns)), []
        for uid, *texts in zip(prompts["uid"], *(prompts[name] for name in columns), strict=True):
            for name, text in zip(columns, texts):
                kind = name.removesuffix("_text")
                if text is None:
                    what = "response" if kind == "response" else f"{kind} response"
                    raise UserError(f"prompt {uid} has no {what} to learn from", where="data.train",
                                    mend=f"set {kind}_key, or take a dataset with {what}s")  # fmt: skip
                ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
                rows.append([*ids, self._tokenizer.eos_token_id])
        responses, mask = padded(rows, self._pad, left=False)
        return batch.with_columns(
            prompts=batch["input_ids"], responses=responses, response_mask=mask,
            input_ids=torch.cat([batch["input_ids"], responses], dim=1),
            attention_mask=torch.cat([batch["attention_mask"], mask], dim=1),
        )  # fmt: skip
