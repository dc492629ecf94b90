"""The prompts of a run: from examples to left padded batches, in an order that survives a restart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.driver.text import pad_token_id, padded
from drivetrain.errors import UserError
from drivetrain.protocol import DataProto
from drivetrain.seeds import derive_seed

if TYPE_CHECKING:
    from drivetrain.config import DataConfig
    from drivetrain.contracts.data import Dataset, Example, Message

_LONG_PASS = 10_000  # prompts; a filter over more of them shows its progress


@dataclass(frozen=True)
class _Prompt:
    example: Example
    messages: Sequence[Message] | None
    text: str
    tokens: list[int]


class PromptSource:
    """Draws batches of prompts from a dataset.

    Epoch ``e`` visits every usable prompt once, in the order of a permutation drawn from ``(seed, e)``. A batch may
    span two epochs. Prompts are tokenized when they are first used; only ``overlong: filter`` reads all of them first.
    """

    def __init__(
        self, dataset: Dataset, tokenizer: Any, config: DataConfig, seed: int, *, where: str = "data.train"
    ) -> None:
        """Raises UserError when no prompt can be used, or ``chat`` is asked of a tokenizer without a chat template.

        Args:
            where: the config section that the dataset is from, for error messages.
        """
        self._dataset, self._tokenizer, self._config, self._seed, self._where = dataset, tokenizer, config, seed, where
        self._pad = pad_token_id(tokenizer)
        has_template = bool(getattr(tokenizer, "chat_template", None))
        self._chat = (has_template and config.template is None) if config.chat is None else config.chat
        if self._chat and not has_template:
            raise UserError("the tokenizer has no chat template", where="data.chat",
                            mend="set data.chat to false, or take a tokenizer with one")  # fmt: skip
        self._cache: dict[int, _Prompt] = {}
        self._usable: Sequence[int] = range(len(dataset))
        if config.overlong == "filter":
            from rich.progress import track

            every = track(self._usable, "Tokenizing prompts", transient=True, disable=len(dataset) < _LONG_PASS)
            self._usable = [i for i in every if len(self._prompt(i).tokens) <= config.max_prompt_tokens]
        if not self._usable:
            left = f"; all {len(dataset)} are longer than {config.max_prompt_tokens} tokens" if len(dataset) else ""
            raise UserError(f"the dataset has no prompts{left}", where=where,
                            mend="look at the dataset's settings and at data.max_prompt_tokens")  # fmt: skip
        self._epoch = self._position = 0
        self._order: tuple[int, Sequence[int]] | None = None

    def __len__(self) -> int:
        """Prompts of an epoch."""
        return len(self._usable)

    def next_batch(self, prompts: int) -> DataProto:
        """The next prompts of the run; see :meth:`all_batches` for the columns. ``uid`` is ``e<epoch>-<index>``."""
        chosen: list[tuple[str, int]] = []
        while len(chosen) < prompts:
            if self._position >= len(self):
                self._epoch, self._position = self._epoch + 1, 0
            part = self._epoch_order()[self._position :][: prompts - len(chosen)]
            chosen += [(f"e{self._epoch}-{index}", index) for index in part]
            self._position += len(part)
        return self._batch(chosen)

    def all_batches(self, prompts: int) -> Iterator[DataProto]:
        """Every prompt once, in the dataset's order; the last batch may be smaller.

        Columns: ``input_ids`` and ``attention_mask`` ``(batch, prompt)``, int64 and left padded; ``uid``
        (``eval-<index>`` here), ``raw_prompt`` (text, the template applied), ``messages`` (what a chat template was
        applied to, or None), ``response_text``, ``rejected_text``, ``answer``, ``data_source`` and ``extra``.
        """
        for start in range(0, len(self), prompts):
            yield self._batch([(f"eval-{index}", index) for index in self._usable[start : start + prompts]])

    def state_dict(self) -> dict[str, int]:
        """Where the next batch starts."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from where :meth:`state_dict` was taken."""
        self._epoch, self._position = int(state["epoch"]), int(state["position"])

    def _epoch_order(self) -> Sequence[int]:
        if not self._config.shuffle:
            return self._usable
        if self._order is None or self._order[0] != self._epoch:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, "prompts", self._epoch))
            order = torch.randperm(len(self), generator=generator).tolist()
            self._order = (self._epoch, [self._usable[place] for place in order])
        return self._order[1]

    def _prompt(self, index: int) -> _Prompt:
        if index not in self._cache:
            example = self._dataset[index]
            messages, text = self._text(index, example)
            tokens = self._tokenizer(text, add_special_tokens=not self._chat)["input_ids"]
            if not tokens:
                raise UserError(f"prompt {index} is empty", where=self._where, mend="mend the dataset")
            self._cache[index] = _Prompt(example, messages, text, tokens)
        return self._cache[index]

    def _text(self, index: int, example: Example) -> tuple[Sequence[Message] | None, str]:
        messages, template = example.prompt, self._config.template
        if isinstance(messages, str):
            text = messages if template is None else template.replace("{prompt}", messages)
            messages = [{"role": "user", "content": text}]
            if not self._chat:
                return None, text
        elif not self._chat or template is not None:
            why = "data.template is set" if template else "data.chat is false, or the tokenizer has no chat template"
            raise UserError(f"prompt {index} is a list of chat messages, but {why}", where=self._where,
                            mend="take a tokenizer with a chat template and no data.template")  # fmt: skip
        text = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return messages, str(text)

    def _fitting(self, index: int) -> list[int]:
        """The prompt's tokens, at most ``max_prompt_tokens`` of them."""
        tokens, most = self._prompt(index).tokens, self._config.max_prompt_tokens
        if len(tokens) <= most:
            return tokens
        if self._config.overlong == "error":
            raise UserError(f"prompt {index} has {len(tokens)} tokens; data.max_prompt_tokens is {most}",
                            where=self._where,
                            mend="raise data.max_prompt_tokens, or set data.overlong to filter")  # fmt: skip
        return tokens[-most:] if self._config.overlong == "truncate_left" else tokens[:most]

    def _batch(self, chosen: Sequence[tuple[str, int]]) -> DataProto:
        input_ids, mask = padded([self._fitting(index) for _, index in chosen], self._pad, left=True)
        prompts = [self._prompt(index) for _, index in chosen]
        return DataProto.from_dict(
            {"input_ids": input_ids, "attention_mask": mask},
            {
                "uid": [uid for uid, _ in chosen],
                "raw_prompt": [prompt.text for prompt in prompts],
                "messages": [prompt.messages for prompt in prompts],
                "response_text": [prompt.example.response for prompt in prompts],
                "rejected_text": [prompt.example.rejected for prompt in prompts],
                **{name: [getattr(prompt.example, name) for prompt in prompts]
                   for name in ("answer", "data_source", "extra")},
            },
        )  # fmt: skip
