"""A sequence classifier of transformers, for the role ``reward``: padded micro-batches, so that encoders work too."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from drivetrain import UserError
from drivetrain_backend_common.judges import classifies
from drivetrain_backend_fsdp import loading
from drivetrain_backend_fsdp.model import check_folder

if TYPE_CHECKING:
    from drivetrain import BackendContext, DataProto

WHERE = "reward_model.model.path"


def load(context: BackendContext) -> PreTrainedModel:
    """Read the classifier that ``context.model`` describes, on the host; with several ranks it has no memory yet, as
    :func:`drivetrain_backend_fsdp.model.load` says.

    Raises:
        drivetrain.UserError: when the folder is missing, is no sequence classifier or lacks weights, its head among
            them: nothing is drawn.
    """
    model, mend = context.model, "give the folder of a sequence classifier (AutoModelForSequenceClassification)"
    check_folder(context, "reward_model.model")

    def refuse(missing: Collection[str]) -> None:
        if missing:
            raise UserError(
                f"{model.path} lacks {len(missing)} weights, first {min(missing)!r}", where=WHERE, mend=mend
            )

    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(model.path, **options)
        if not classifies(config):
            raise UserError(f"{model.path} holds {config.architectures[0]}, which has no classification head",
                            where=WHERE, mend=mend)  # fmt: skip
        options["dtype"] = getattr(torch, model.dtype)
        kind = AutoModelForSequenceClassification

        def whole() -> PreTrainedModel:
            made, report = cast(
                Any, kind.from_pretrained(model.path, **options, config=config, output_loading_info=True)
            )
            refuse(report["missing_keys"])
            return cast(PreTrainedModel, made)

        if context.world_size == 1:
            loaded = whole()
        else:
            loaded = loading.skeleton(kind, model.path, config, options)
            if loading.has_slices(model.path, config):
                refuse(loading.plan_slices(loaded, model.path, context.rank))
            else:
                loading.plan_broadcast(loaded, whole, context.rank)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"{model.path} does not load as a sequence classifier: {error}", where=WHERE, mend=mend,
                        ) from error  # fmt: skip
    return cast(PreTrainedModel, loaded.eval())


class Texts:
    """A batch of texts, on the host, cut into micro-batches of rows of similar length.

    Decoders find the last token of a text by ``pad_token_id`` of their config. Where the config has none, it gets a
    token that no text of the batch has, so that the last token is the last one whatever it is.
    """

    def __init__(self, batch: DataProto, model: PreTrainedModel, budget: int) -> None:
        """Raises UserError for tokens or positions that the model does not have.

        Args:
            budget: of tokens in a micro-batch, padding counted.
        """
        self.config = model.config.get_text_config()
        self.columns = {"input_ids": batch.batch["input_ids"].cpu()}
        if "token_type_ids" in batch and "token_type_ids" in inspect.signature(model.forward).parameters:
            self.columns["token_type_ids"] = batch.batch["token_type_ids"].cpu()
        real = batch.batch["attention_mask"].cpu() != 0
        self.lengths: list[int] = real.sum(dim=1).tolist()
        used = self.columns["input_ids"][real].unique()
        vocab_size, positions = len(cast(nn.Embedding, model.get_input_embeddings()).weight), _positions(model)
        if len(used) and not 0 <= int(used[0]) <= int(used[-1]) < vocab_size:
            raise UserError(f"token {int(used[-1])} is not among the {vocab_size} tokens of the reward model",
                            where="reward_model.model.tokenizer", mend="use the tokenizer that belongs to the model",
                            )  # fmt: skip
        if positions is not None and max(self.lengths, default=0) > positions:
            raise UserError(f"a text has {max(self.lengths)} tokens; the reward model has {positions} positions",
                            where="reward_model.max_tokens", mend=f"set it to {positions}")  # fmt: skip
        self.pad: int | None = getattr(self.config, "pad_token_id", None)
        if self.pad is None or not 0 <= self.pad < vocab_size:
            known = set(used.tolist())
            self.pad = next((token for token in range(vocab_size) if token not in known), None)
        self.plan = self._plan(budget if self.pad is not None else 0)  # without a free token, one row at a time

    def _plan(self, budget: int) -> list[list[int]]:
        """Rows of each micro-batch, longest first."""
        plan: list[list[int]] = []
        for row in sorted(range(len(self.lengths)), key=lambda row: -self.lengths[row]):
            if plan and (len(plan[-1]) + 1) * self.lengths[plan[-1][0]] <= budget:
                plan[-1].append(row)
            else:
                plan.append([row])
        return plan

    def logits(self, model: PreTrainedModel, rows: Sequence[int], device: torch.device) -> Tensor:
        """``(rows, labels)`` of one micro-batch; without rows, those of a filler of one token."""
        lengths = torch.tensor([self.lengths[row] for row in rows] or [1])
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        inputs = {"attention_mask": mask}
        for name, column in self.columns.items():
            filling = self.pad if name == "input_ids" and self.pad is not None else 0
            part = column[list(rows), : mask.shape[1]] if rows else torch.zeros_like(mask)
            inputs[name] = torch.where(mask == 1, part, filling)
        before, self.config.pad_token_id = getattr(self.config, "pad_token_id", None), self.pad
        try:
            return cast(Tensor, model(**{name: value.to(device) for name, value in inputs.items()}).logits)
        finally:
            self.config.pad_token_id = before


def _positions(model: nn.Module) -> int | None:
    """Positions of a model that has an embedding for each; None where positions have no end."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("position_embeddings", "wpe") and isinstance(module, nn.Embedding):
            # RoBERTa and its kin count positions from behind that of padding
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    return None
