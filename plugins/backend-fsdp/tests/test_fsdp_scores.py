"""Reward models: the scores of texts are those of plain calls of transformers, one text at a time."""

from pathlib import Path

import fsdp_judges as judges
import fsdp_rig as rig
import pytest
import torch
import torch.multiprocessing as multiprocessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from drivetrain import PluginError, RunError, UserError

CHAT = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "two and two"}]
#: float32 sums in another order; scores are of the size 1
CLOSE = {"atol": 2e-6, "rtol": 2e-6}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return judges.write("Llama", tmp_path_factory.mktemp("judge"), labels=1)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return judges.write("Bert", tmp_path_factory.mktemp("judge"), labels=2)


def one_by_one(folder: Path) -> torch.Tensor:
    return torch.stack([judges.plain_logits(folder, prompt + response) for prompt, _, response in judges.TEXTS])


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Bert", "Roberta", "ModernBert"])
@pytest.mark.parametrize("tokens", [1, 40, 10_000])
def test_a_regression_equals_transformers(family: str, tokens: int, tmp_path: Path) -> None:
    folder = judges.write(family, tmp_path, labels=1)
    want = one_by_one(folder)[:, 0]
    assert want.std() > 0.01
    scores = judges.scores(judges.worker(folder, backend={"micro_batch_tokens": tokens}))
    assert scores.dtype == torch.float32 and scores.shape == (5,)
    torch.testing.assert_close(scores, want, **CLOSE)


def test_outputs_of_two_labels(bert: Path) -> None:
    logits = one_by_one(bert)
    made = {name: judges.scores(judges.worker(bert, label_index=1, output=name))
            for name in ("logit", "probability", "log_odds")}  # fmt: skip
    torch.testing.assert_close(made["logit"], logits[:, 1], **CLOSE)
    torch.testing.assert_close(made["probability"], logits.softmax(dim=1)[:, 1], **CLOSE)
    torch.testing.assert_close(made["log_odds"], logits[:, 1] - logits[:, 0], **CLOSE)
    other = judges.scores(judges.worker(bert, label_index=0, output="probability"))
    torch.testing.assert_close(other, 1 - made["probability"], **CLOSE)
    judge = pipeline("text-classification", model=str(bert), top_k=None)
    told = judge([prompt + response for prompt, _, response in judges.TEXTS])
    theirs = [next(label["score"] for label in labels if label["label"] == "LABEL_1") for labels in told]
    torch.testing.assert_close(made["probability"], torch.tensor(theirs), **CLOSE)


def test_outputs_of_one_and_of_three_labels(llama: Path, tmp_path: Path) -> None:
    logits = one_by_one(llama)[:, 0]
    assert judges.scores(judges.worker(llama, output="log_odds")).equal(judges.scores(judges.worker(llama)))
    probability = judges.scores(judges.worker(llama, output="probability", label_index=0))
    torch.testing.assert_close(probability, logits.sigmoid(), **CLOSE)
    three = judges.write("Qwen2", tmp_path, labels=3)
    odds = judges.scores(judges.worker(three, output="log_odds", label_index=2))
    p = one_by_one(three).double().softmax(dim=1)[:, 2]
    torch.testing.assert_close(odds, (p / (1 - p)).log().float(), **CLOSE)


def test_a_batch_equals_one_at_a_time(llama: Path) -> None:
    made = judges.worker(llama)
    alone = torch.cat([judges.scores(made, [text]) for text in judges.TEXTS])
    torch.testing.assert_close(judges.scores(made), alone, **CLOSE)
    assert judges.scores(made, judges.TEXTS * 3).unique().numel() >= 5
    assert made.compute_rm_score(judges.batch()[:0])["rm_scores"].shape == (0,)


def test_padding_is_found_as_the_model_was_trained(tmp_path: Path) -> None:
    """A decoder that was trained with [SEP] as padding looks at the token before it; one without padding at [SEP]."""
    told = judges.write("Llama", tmp_path / "told", labels=1, pad=2)
    untold = judges.write("Llama", tmp_path / "untold", labels=1)
    for folder in (told, untold):
        torch.testing.assert_close(judges.scores(judges.worker(folder)), one_by_one(folder)[:, 0], **CLOSE)
    assert not torch.allclose(judges.scores(judges.worker(told)), judges.scores(judges.worker(untold)), atol=1e-2)
    assert AutoTokenizer.from_pretrained(untold).pad_token_id is None


def test_a_batch_with_every_token_leaves_none_to_pad_with(llama: Path) -> None:
    backend = judges.worker(llama).backends["reward"]
    ids = torch.stack([torch.arange(64), torch.arange(64).flip(0), torch.zeros(64, dtype=torch.long)])
    mask = torch.ones_like(ids)
    mask[2, 3:] = 0
    rows = judges.DataProto.from_dict({"input_ids": ids, "attention_mask": mask})
    together = backend.forward(rows, ("scores",), temperature=1.0)["scores"]
    model = AutoModelForSequenceClassification.from_pretrained(llama, attn_implementation="eager")
    with torch.no_grad():
        want = torch.cat([model(input_ids=row[None]).logits for row in (ids[0], ids[1], ids[2, :3])])
    torch.testing.assert_close(together, want, **CLOSE)


def test_forms_of_a_text(tmp_path: Path) -> None:
    bert = judges.write("Bert", tmp_path / "bert", labels=1)
    chat = judges.write("Llama", tmp_path / "chat", labels=1, chat=True)
    said = [("raw", CHAT, "4"), ("one", None, "1")]
    rendered = "[CLS]system:be kind.user:two and two.assistant:4."  # [CLS] once, and no [SEP]
    tokenizer = AutoTokenizer.from_pretrained(chat)
    row = judges.worker(chat).encoder.row(*said[0])["input_ids"]
    assert row == tokenizer(rendered, add_special_tokens=False)["input_ids"] and row.count(tokenizer.cls_token_id) == 1
    plain, templated = judges.plain_logits, {"add_special_tokens": False}
    expected = [
        (chat, None, [plain(chat, rendered, **templated), plain(chat, "one1")]),
        (chat, "chat", [plain(chat, rendered, **templated), plain(chat, "[CLS]user:one.assistant:1.", **templated)]),
        (bert, None, [plain(bert, "be kind\n\ntwo and two\n\n4"), plain(bert, "one1")]),
        (bert, "pair", [plain(bert, "be kind\n\ntwo and two", "4"), plain(bert, "one", "1")]),
    ]
    for folder, form, logits in expected:
        got = judges.scores(judges.worker(folder, format=form), said)
        torch.testing.assert_close(got, torch.cat(logits), **CLOSE)
    types = judges.worker(bert, format="pair").encoder.row(*said[1])["token_type_ids"]
    assert types == [0, 0, 0, 0, 0, 1, 1]


def test_the_tokenizer_may_be_elsewhere(llama: Path, tmp_path: Path) -> None:
    judges.write_tokenizer(tmp_path, chat=True)
    row = judges.worker(llama, model={"tokenizer": tmp_path}).encoder.row("raw", CHAT, "4")
    assert len(row["input_ids"]) == len("[CLS]system:be kind.user:two and two.assistant:4.") - 4


def test_long_texts(bert: Path, llama: Path, tmp_path: Path) -> None:
    long = [("abcdefgh", None, "12")]
    chat = judges.write("Llama", tmp_path / "chat", labels=1, chat=True)
    with pytest.raises(UserError, match=r"have 12 tokens; the reward model reads 9 \(reward_model.max_tokens\)"):
        judges.scores(judges.worker(llama, max_tokens=9), long)
    cut = {"max_tokens": 9, "overlong": "truncate_left"}
    got = judges.scores(judges.worker(llama, **cut), long)
    torch.testing.assert_close(got, judges.plain_logits(llama, "defgh12"), **CLOSE)
    pair = judges.worker(bert, format="pair", label_index=1, **cut)
    torch.testing.assert_close(
        judges.scores(pair, long), judges.plain_logits(bert, "efgh", "12")[1:], **CLOSE
    )  # [CLS] efgh [SEP] 12 [SEP]
    said = judges.worker(chat, max_tokens=20, overlong="truncate_left").encoder.row("", CHAT, "4")["input_ids"]
    whole = AutoTokenizer.from_pretrained(chat)("wo.assistant:4.", add_special_tokens=False)["input_ids"]
    assert said[0] == 1 and said[-len(whole) :] == whole and len(said) == 20
    for worker in (judges.worker(llama, **cut), pair):
        with pytest.raises(UserError, match="too long by itself"):
            judges.scores(worker, [("ab", None, "0123456789")])
    unlimited = judges.worker(bert, label_index=1)  # neither the section nor the tokenizer knows a limit
    with pytest.raises(UserError, match=r"has 83 tokens; the reward model has 80 positions \(reward_model.max_tokens"):
        judges.scores(unlimited, [("a" * 80, None, "1")])
    roberta = judges.write("Roberta", tmp_path / "roberta", labels=1)
    assert judges.scores(judges.worker(roberta), [("a" * 78, None, "1")]).shape == (1,)
    with pytest.raises(UserError, match="has 82 tokens; the reward model has 81 positions"):
        judges.scores(judges.worker(roberta), [("a" * 79, None, "1")])


def test_a_limit_of_the_tokenizer_holds(llama: Path, tmp_path: Path) -> None:
    judges.write_tokenizer(tmp_path, model_max_length=8)
    with pytest.raises(UserError, match="have 12 tokens; the reward model reads 8"):
        judges.scores(judges.worker(llama, model={"tokenizer": tmp_path}), [("abcdefgh", None, "12")])


def test_bfloat16_compute_is_close(llama: Path) -> None:
    fine = judges.scores(judges.worker(llama))
    for options in ({"backend": {"compute_dtype": "bfloat16"}}, {"model": {"dtype": "bfloat16"}}):
        coarse = judges.scores(judges.worker(llama, **options))
        assert coarse.dtype == torch.float32 and 0 < float((coarse - fine).abs().mean()) < 0.1


@pytest.mark.parametrize("index, where", [(None, "the score is not said"), (2, "there is no label 2")])
def test_the_label_has_to_be_there(bert: Path, index: int | None, where: str) -> None:
    with pytest.raises(UserError, match=f"has 2 labels; {where} .reward_model.label_index") as raised:
        judges.worker(bert, label_index=index)
    assert "0 to 1" in str(raised.value)


def test_one_label_has_no_index(llama: Path) -> None:
    with pytest.raises(UserError, match=r"has 1 label; there is no label 1(.|\n)*leave it out"):
        judges.worker(llama, label_index=1)


def test_what_is_no_classifier_is_refused(qwen2: Path, llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds Qwen2ForCausalLM, which has no classification head"):
        judges.worker(qwen2)
    model = AutoModelForSequenceClassification.from_pretrained(llama)
    weights = {name: p for name, p in model.state_dict().items() if "score" not in name}
    model.save_pretrained(tmp_path / "headless", state_dict=weights)
    judges.write_tokenizer(tmp_path / "headless")
    with pytest.raises(UserError, match="lacks 1 weights, first 'score.weight'"):
        judges.worker(tmp_path / "headless")
    with pytest.raises(UserError, match="cannot load the tokenizer"):
        judges.worker(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"is no folder \(reward_model.model.path\)"):
        judges.worker(tmp_path / "nowhere", model={"tokenizer": llama})
    with pytest.raises(UserError, match="has no chat template"):
        judges.worker(llama, format="chat")
    with pytest.raises(UserError, match=r"token 70 is not among the 64 tokens .* \(reward_model.model.tokenizer\)"):
        ids = torch.tensor([[70]])
        rows = judges.DataProto.from_dict({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        judges.worker(llama).backends["reward"].forward(rows, ("scores",), temperature=1.0)


def test_a_judge_does_nothing_else(llama: Path) -> None:
    made = judges.worker(llama).backends["reward"]
    assert not any(p.requires_grad for p in made.model.parameters()) and not made.model.training
    with pytest.raises(PluginError, match="does not compute .*log_probs.* role reward"):
        made.forward(rig.batch(), ["log_probs"], temperature=1.0)
    with pytest.raises(RunError, match="'reward' has no optimizer"):
        made.update(rig.batch(), rig.TERMS, rig.counts(rig.batch()), temperature=1.0, lr_factor=1.0)


def test_two_ranks_equal_one(llama: Path, bert: Path, tmp_path: Path) -> None:
    multiprocessing.spawn(judges.work, (llama, bert, tmp_path), nprocs=2)
    ranks = [torch.load(tmp_path / f"seen-{rank}.pt") for rank in range(2)]
    one = [judges.scores(judges.worker(llama)), judges.scores(judges.worker(bert, label_index=1, output="log_odds"))]
    for want, *parts in zip(one, *ranks, strict=True):
        for pieces in zip(*parts, strict=True):  # uneven, and all on one rank
            torch.testing.assert_close(torch.cat(pieces), want, **CLOSE)
