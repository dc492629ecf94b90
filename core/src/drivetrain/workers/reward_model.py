"""The worker of a reward model, on any engine that runs classifiers. It works from text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drivetrain.driver.text import load_tokenizer, padded
from drivetrain.errors import UserError
from drivetrain.protocol import DataProto
from drivetrain.workers.model_worker import ModelWorker
from drivetrain.workers.registration import register

if TYPE_CHECKING:
    from drivetrain.config import RewardModelConfig
    from drivetrain.contracts.data import Message


class RewardModelWorker(ModelWorker):
    """Plays ``reward``: judges prompts and responses with a model that does not learn."""

    @register()
    def init_model(self) -> str:
        """Load the model and judge a text. Returns the name of the device.

        Raises:
            UserError: ``reward_model.label_index`` does not fit the model's labels.
        """
        section = self.config.reward_model
        assert section is not None and section.backend is not None
        self.section, self.encoder = section, RewardTextEncoder(section)
        self.start_backend("reward", section.backend, section.model)
        labels, index = self._logits([("1", None, "1")]).shape[1], section.label_index
        if (index or 0) >= labels or (index is None and labels > 1):
            wrong = "the score is not said" if index is None else f"there is no label {index}"
            which = "leave it out" if labels == 1 else f"give the index of the good label, 0 to {labels - 1}"
            raise UserError(f"the reward model has {labels} label{'s' * (labels > 1)}; {wrong}",
                            where="reward_model.label_index", mend=which)  # fmt: skip
        return self.device_name

    @register("dp_compute_proto")
    def compute_rm_score(self, texts: DataProto) -> DataProto:
        """``rm_scores`` (rows,) float32 of ``prompt``, ``messages`` (None for a plain prompt) and ``response``.

        Raises:
            UserError: a text is longer than ``reward_model.max_tokens`` and must not or cannot be cut.
        """
        rows = list(zip(texts["prompt"], texts["messages"], texts["response"], strict=True))
        scores = score_of(self._logits(rows), self.section.output, self.section.label_index or 0)
        return DataProto.from_dict({"rm_scores": scores})

    def _logits(self, rows: Sequence[tuple[str, Sequence[Message] | None, str]]) -> Tensor:
        batch = self.encoder([self.encoder.row(*row) for row in rows])
        with self.phase("reward", "reward", "parameters"):
            return self.backends["reward"].forward(batch, ("scores",), temperature=1.0)["scores"].cpu()


def score_of(logits: Tensor, output: str, index: int) -> Tensor:
    """The score ``(rows,)`` of one label, from logits ``(rows, labels)``; see ``reward_model.output``."""
    own = logits[:, index]
    if output == "logit":
        return own
    others = torch.cat([logits[:, :index], logits[:, index + 1 :]], dim=1)
    log_odds = own - others.logsumexp(dim=1) if others.shape[1] else own
    return log_odds if output == "log_odds" else log_odds.sigmoid()


class RewardTextEncoder:
    """Prompt and response in tokens of the reward model."""

    def __init__(self, section: RewardModelConfig) -> None:
        """Raises UserError when there is no tokenizer, or ``format: chat`` is asked of one without a chat template."""
        self._section, self._tokenizer = section, load_tokenizer(section.model)
        self._has_template = bool(getattr(self._tokenizer, "chat_template", None))
        if section.format == "chat" and not self._has_template:
            raise UserError("the reward model's tokenizer has no chat template", where="reward_model.format",
                            mend="choose text or pair, or set reward_model.model.tokenizer")  # fmt: skip
        self._longest: int = section.max_tokens or self._tokenizer.model_max_length

    def __call__(self, rows: Sequence[Mapping[str, list[int]]]) -> DataProto:
        """Rows that :meth:`row` made, right padded: ``input_ids``, ``attention_mask``, perhaps ``token_type_ids``."""
        input_ids, mask = padded([row["input_ids"] for row in rows], 0, left=False)
        columns = {"input_ids": input_ids, "attention_mask": mask}
        if rows and "token_type_ids" in rows[0]:
            columns["token_type_ids"] = padded([row["token_type_ids"] for row in rows], 0, left=False)[0]
        return DataProto.from_dict(columns)

    def row(self, prompt: str, messages: Sequence[Message] | None, response: str) -> dict[str, list[int]]:
        """The tokens of one prompt and response, at most ``max_tokens``.

        Where a chat template is applied it writes all special tokens itself. Elsewhere the tokenizer adds them, and
        chat messages are their contents with empty lines between, so that no marks of the policy's template remain.
        """
        tokenizer, form = self._tokenizer, self._section.format
        if form is None:
            form = "chat" if messages is not None and self._has_template else "text"
        if form == "chat":
            chat = list(messages or [{"role": "user", "content": prompt}])
            before = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            chat.append({"role": "assistant", "content": response})
            texts = [tokenizer.apply_chat_template(chat, tokenize=False)]
        else:
            before = "\n\n".join(m["content"] for m in messages) + "\n\n" * (form == "text") if messages else prompt
            texts = [before, response] if form == "pair" else [before + response]
        encoded = tokenizer(*texts, add_special_tokens=form != "chat", verbose=False)  # what is too long: see _cut
        row: dict[str, list[int]] = {k: encoded[k] for k in ("input_ids", "token_type_ids") if k in encoded}
        if not row["input_ids"]:
            raise UserError("a prompt and its response have no token for the reward model", where="reward_model.model",
                            mend="look at its tokenizer")  # fmt: skip
        return self._cut(row, before)

    def _cut(self, row: dict[str, list[int]], before: str) -> dict[str, list[int]]:
        """The row without the first tokens of its prompt, as far as it is too long; a leading special token stays."""
        tokenizer, tokens = self._tokenizer, row["input_ids"]
        excess = len(tokens) - self._longest
        if excess <= 0:
            return row
        length = f"{len(tokens)} tokens; the reward model reads {self._longest}"
        if self._section.overlong == "error":
            raise UserError(f"a prompt and its response have {length}", where="reward_model.max_tokens",
                            mend="set reward_model.overlong to truncate_left, or raise max_tokens")  # fmt: skip
        first = int(tokens[0] in (tokenizer.bos_token_id, tokenizer.cls_token_id))
        prompt = tokenizer(before, add_special_tokens=False, verbose=False)["input_ids"]
        if excess > len(prompt) - int(prompt[:1] == tokens[:first]):
            raise UserError(f"a response is too long by itself: with its prompt it has {length}",
                            where="reward_model.max_tokens", mend="lower rollout.max_response_tokens")  # fmt: skip
        return {name: column[:first] + column[first + excess :] for name, column in row.items()}
