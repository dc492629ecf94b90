"""The standard columns: what a part of drivetrain finds under which name, in one table.

Sizes in a shape: `batch` rows; `prompt` and `response` tokens after padding; `sequence` = `prompt`
before generation and `prompt + response` after. Prompts are padded on the left and responses on the
right, so that the first response token stands at position `prompt` in every row. Response-aligned
columns hold at `[i, t]` what belongs to token `responses[i, t]`; where `response_mask` is 0 they may
hold anything, NaN too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from drivetrain.protocol.dataproto import DataProto


class Column(NamedTuple):
    """One standard column: its name, shape such as `(batch, response)`, dtype (a key of `ACCEPTED`) and meaning."""

    name: str
    shape: str
    dtype: str
    meaning: str


# What each dtype accepts: how names of dtypes may begin, and the same in words.
ACCEPTED = {
    "int64": (("int", "uint"), "integer"),
    "float32": (("float", "bfloat"), "floating, of any precision"),
    "mask": (("bool", "int", "uint"), "boolean or integer, of 0 and 1"),
    "id": (("int", "uint", "object"), "integer, or objects that can be hashed"),
    "object": (("object",), "objects"),
}
_ROW, _PROMPT = "(batch,)", "(batch, prompt)"
_RESPONSE, _SEQUENCE = "(batch, response)", "(batch, sequence)"
_TABLE = (
    Column("prompts", _PROMPT, "int64", "prompt tokens, left padded"),
    Column("responses", _RESPONSE, "int64", "tokens after the prompt, the policy's own unchanged, right padded"),
    Column("input_ids", _SEQUENCE, "int64", "before generation the prompts, after it prompts and responses joined"),
    Column("attention_mask", _SEQUENCE, "mask", "1 for tokens and 0 for padding of input_ids"),
    Column("position_ids", _SEQUENCE, "int64", "position of each token of input_ids; 0 at the first real token"),
    Column("response_mask", _RESPONSE, "mask", "the action mask: 1 where the policy chose the token, 0 elsewhere"),
    Column("rollout_log_probs", _RESPONSE, "float32", "log-probability (nats) by the rollout engine that sampled"),
    Column("old_log_probs", _RESPONSE, "float32", "log-probability (nats) by the trainer's policy before the update"),
    Column("ref_log_probs", _RESPONSE, "float32", "log-probability (nats) by the reference policy"),
    Column("entropy", _RESPONSE, "float32", "entropy (nats) of the policy's distribution at each token"),
    Column("values", _RESPONSE, "float32", "the critic's value of the state in which each token was chosen"),
    Column("token_level_scores", _RESPONSE, "float32", "score before KL; of a whole response at its last token"),
    Column("token_level_rewards", _RESPONSE, "float32", "token_level_scores less the KL penalty"),
    Column("advantages", _RESPONSE, "float32", "advantage of each token"),
    Column("returns", _RESPONSE, "float32", "target of the critic at each token"),
    Column("rollout_is_weights", _RESPONSE, "float32", "importance weight, trainer's policy over rollout's"),
    Column("weight_version", _RESPONSE, "int64", "version of the weights that sampled each token"),
    Column("uid", _ROW, "id", "the prompt a row belongs to; samples of one prompt share it"),
    Column("loss_group", _ROW, "id", "rows whose loss is one term (a pair), never separated; None joins nothing"),
    Column("sample_index", _ROW, "int64", "number of the sample among those of its uid"),
    Column("is_padding", _ROW, "mask", "1 in rows that only fill the batch up; there only in a padded batch"),
    Column("rm_scores", _ROW, "float32", "a reward model's score of prompt and response"),
    Column("reward_baselines", _ROW, "float32", "score of the greedy completion of the row's prompt"),
    Column("win_rate", _ROW, "float32", "estimated probability to be preferred to a response of the policy"),
    Column("data_source", _ROW, "object", "name of the dataset that the prompt came from"),
    Column("answer", _ROW, "object", "what a rule-based reward compares with"),
    Column("raw_prompt", _ROW, "object", "prompt as text, the template applied"),
    Column("messages", _ROW, "object", "prompt as chat messages, before the template; None for one without"),
    Column("response_text", _ROW, "object", "the response as text, without special tokens"),
    Column("rejected_text", _ROW, "object", "the worse response of a preference pair, as text; None for none"),
    Column("preference", _ROW, "float32", "of the two rows of a loss_group, 1 for the better, -1 for the worse"),
    Column("finish_reason", _ROW, "object", "why generation ended: stop, length or abort"),
)
STANDARD_COLUMNS = {column.name: column for column in _TABLE}


def check_columns(proto: DataProto, required: Iterable[str]) -> None:
    """Check that `proto` has the columns `required`, standard ones as the table says; nothing is fetched.

    Sizes of one name must agree among the required columns. ValueError lists everything missing or wrong.
    """
    sizes: dict[str, tuple[int, str]] = {}
    problems = []
    for name in required:
        if name not in proto:
            problems.append(f"there is no {name} among {proto.keys()}")
        elif name in STANDARD_COLUMNS:
            standard, found = STANDARD_COLUMNS[name], proto.stored[name]
            labels, (beginnings, words) = re.findall(r"\w+", standard.shape), ACCEPTED[standard.dtype]
            if not str(found.dtype).removeprefix("torch.").startswith(beginnings):
                problems.append(f"{name} is {found.dtype}; it must be {words}")
            if len(found.shape) != len(labels):
                problems.append(f"{name} has shape {tuple(found.shape)}; it must be {standard.shape}")
            for label, size in zip(labels, found.shape):
                expected, where = sizes.setdefault(label, (size, name))
                if size != expected:
                    problems.append(f"{name} has {label} size {size}, {where} has {expected}")
    if problems:
        raise ValueError("columns do not fit: " + "; ".join(problems))


def columns_markdown() -> str:
    """The table as markdown, for the documentation."""
    head = "| column | shape | dtype | meaning |\n| --- | --- | --- | --- |\n"
    return head + "".join(f"| `{c.name}` | `{c.shape}` | {c.dtype} | {c.meaning} |\n" for c in _TABLE)
