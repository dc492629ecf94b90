"""A reward model that generates its verdict, on an engine that says what the test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from drivetrain.builtin.local_executor import LocalWorkerGroup
from drivetrain.builtin.per_sample import SampleError
from drivetrain.config import JudgeConfig, ModelConfig, PluginConfig, RewardModelConfig, RolloutConfig
from drivetrain.contracts.data import RewardSample, Score
from drivetrain.contracts.rollout import Completion, GenerationRequest, RolloutContext, RolloutEngine
from drivetrain.driver.judging import GenerativeReward, number_in
from drivetrain.errors import UserError
from drivetrain.workers import GenerativeRewardWorker, generative_reward
from drivetrain.workers.registration import registration

VOCABULARY = ["<unk>", "<s>", "</s>", *"0123456789abcdefghijklmnopqrstuvwxyz{}.-/[]"]


class Engine(RolloutEngine):
    """Answers with the characters that ``says`` gives for the question."""

    says: Callable[[str, int], str]
    closed = False

    def __init__(self, config: RolloutConfig, context: RolloutContext) -> None:
        super().__init__(config, context)
        self.requests: list[GenerationRequest] = []

    def initialize(self) -> None:
        self.asked: dict[str, int] = {}

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Completion]:
        self.requests.append(request)
        question = "".join(VOCABULARY[token] for token in request.prompt_token_ids)
        if "hh" in question:
            raise UserError("too long", where="rollout.max_response_tokens", mend="be short")
        self.asked[question] = self.asked.get(question, -1) + 1
        tokens = [VOCABULARY.index(character) for character in self.says(question, self.asked[question])] + [2]
        yield Completion(request_id=request.request_id, sample=0, token_ids=tuple(tokens), finish_reason="stop",
                         log_probs=(0.0,) * len(tokens), weight_versions=((0, 0),))  # fmt: skip

    async def abort(self, request_id: str) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...

    def close(self) -> None:
        self.closed = True


class Judging:
    """A worker and the reward on the driver's side."""

    def __init__(self, folder: Path, says: Callable[[str, int], str], temperature: float, **judge: Any) -> None:
        Engine.says = staticmethod(says)  # type: ignore[assignment]
        section = RewardModelConfig(
            model=ModelConfig(path=folder), judge=JudgeConfig(**{"prompt": "{response}", **judge}),
            rollout=RolloutConfig(name="any", temperature=temperature, max_response_tokens=9, min_response_tokens=2),
        )  # fmt: skip
        run = SimpleNamespace(reward_model=section, trainer=SimpleNamespace(seed=3), hardware=PluginConfig(name="cpu"))
        self.group = LocalWorkerGroup(GenerativeRewardWorker(run, "reward"))  # type: ignore[arg-type]
        assert "cpu" in self.group.call("init_model")
        self.engine: Engine = self.group.worker.engine  # type: ignore[attr-defined]
        [trial] = self.engine.requests
        assert (trial.sampling.max_tokens, trial.sampling.min_tokens) == (1, 0)
        self.engine.requests.clear()
        self.score = GenerativeReward(self.group, section)

    def questions(self) -> list[str]:
        return ["".join(VOCABULARY[token] for token in request.prompt_token_ids) for request in self.engine.requests]


@pytest.fixture
def judging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Judging]:
    monkeypatch.setattr(generative_reward, "resolve", lambda hook, name: Engine)
    inner = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])

    def make(says: Callable[[str, int], str] = lambda question, attempt: "1", temperature: float = 0.0,
             template: str | None = None, **judge: Any) -> Judging:  # fmt: skip
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
        )
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path)
        return Judging(tmp_path, says, temperature, **judge)

    return make


def sample(response: str, prompt: str = "", answer: str | None = None, messages: Any = None) -> RewardSample:
    return RewardSample(uid="0", prompt=prompt, messages=messages, response=response, response_token_ids=[],
                        answer=answer, finish_reason="stop", data_source="")  # fmt: skip


def test_the_question_holds_the_sample_and_the_score_is_the_verdict(judging: Callable[..., Judging]) -> None:
    made = judging(lambda question, attempt: str(len(question)), prompt="[{prompt}/{response}/{answer}]{x}")
    chat = [{"role": "system", "content": "ab"}, {"role": "user", "content": "c"}]
    scores = made.score([sample("{answer}", "a", "b"), sample("", "<marks of the policy>", "0", chat)])
    first, second = made.questions()
    assert first == "<s>[a/{answer}/b]{x}"
    assert second == "<s>[ab<unk><unk>c//0]{x}"
    assert scores == [Score(len(first)), Score(len(second))]
    assert all(request.sampling.max_tokens == 9 for request in made.engine.requests)
    assert made.score([]) == []
    assert registration(GenerativeRewardWorker, "generate_verdicts").dispatch_mode == "dp_compute_proto"
    made.group.worker.close()
    assert made.engine.closed


def test_a_chat_template_writes_all_special_tokens(judging: Callable[..., Judging]) -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    made = judging(template=template)
    made.score([sample("b")])
    assert made.questions() == ["[b]a"]


def test_samples_that_read_alike_are_judged_once_and_drawn_alike(judging: Callable[..., Judging]) -> None:
    made = judging(temperature=1.0)
    made.score([sample("a"), sample("b"), sample("a")])
    made.score([sample("b")])
    assert made.questions() == ["<s>a", "<s>b", "<s>b"]
    a, b, again = (request.seeds for request in made.engine.requests)
    assert a != b and b == again


def test_what_cannot_be_read_is_asked_again_with_another_seed(judging: Callable[..., Judging]) -> None:
    made = judging(lambda question, attempt: "7" if "b" not in question or attempt == 2 else "c", temperature=0.5)
    assert made.score([sample("a"), sample("b")]) == [Score(7.0), Score(7.0)]
    assert made.questions() == ["<s>a", "<s>b", "<s>b", "<s>b"]
    assert len({request.seeds for request in made.engine.requests}) == 4


@pytest.mark.parametrize(("temperature", "retries", "asked", "said"), [
    (0.0, 2, 1, "no number could be read from the verdict 'c'"),
    (1.0, 0, 1, "no number could be read from the verdict 'c'"),
    (1.0, 4, 5, "no number could be read from the verdict 'c', the last of 5 that were drawn"),
])  # fmt: skip
def test_what_is_never_read_is_an_error_about_its_sample(
    judging: Callable[..., Judging], temperature: float, retries: int, asked: int, said: str
) -> None:
    made = judging(lambda question, attempt: "c" if "b" in question else "1", temperature, verdict_retries=retries)
    with pytest.raises(SampleError) as caught:
        made.score([sample("a"), sample("a"), sample("b")])
    assert caught.value.index == 2 and str(caught.value.__cause__) == said
    assert made.questions().count("<s>b") == asked and made.questions().count("<s>a") == 1


def test_a_long_verdict_is_shown_shortened(judging: Callable[..., Judging]) -> None:
    made = judging(lambda question, attempt: "c" * 1000)
    with pytest.raises(SampleError) as caught:
        made.score([sample("a")])
    assert 150 < len(str(caught.value.__cause__)) < 260 and "..." in str(caught.value.__cause__)


def test_a_question_with_an_answer_needs_one(judging: Callable[..., Judging]) -> None:
    made = judging(prompt="{response}/{answer}")
    with pytest.raises(SampleError) as caught:
        made.score([sample("a", answer="b"), sample("a")])
    assert caught.value.index == 1 and "the sample has no answer" in str(caught.value.__cause__)
    assert not made.questions()


def test_an_error_of_the_engine_names_the_section_that_it_is_in(judging: Callable[..., Judging]) -> None:
    with pytest.raises(UserError, match=r"too long \(reward_model.rollout.max_response_tokens\)"):
        judging().score([sample("hh")])


def test_right_and_wrong(judging: Callable[..., Judging]) -> None:
    made = judging(lambda question, attempt: question[-1], correct_above=5)
    assert made.score([sample("6"), sample("5")]) == [Score(6.0, True), Score(5.0, False)]
    assert judging().score([sample("6")]) == [Score(1.0, None)]


@pytest.mark.parametrize(("verdict", "options", "number"), [
    (" -2.5\n", {}, -2.5), ("8/10", {}, None), ("I say 8", {}, None), ("", {}, None), ("1e5", {}, None),
    ("first 3, then Score: 8", {"pattern": r"Score: (\d+)"}, 8.0),
    ("Score: 3. No, Score: 4.", {"pattern": r"Score: (\d+)"}, 4.0),
    ("3 4", {"pattern": r"\d"}, 4.0), ("good", {"pattern": "g(o*)d"}, None), ("g", {"pattern": "g(o)?"}, None),
    ("nan", {"pattern": "nan|inf"}, None), ("inf", {"pattern": "nan|inf"}, None),
    ("1", {"min": 1, "max": 10}, 1.0), ("10", {"min": 1, "max": 10}, 10.0), ("0", {"min": 1}, None),
    ("11", {"max": 10}, None),
])  # fmt: skip
def test_the_number_in_a_verdict(verdict: str, options: dict[str, Any], number: float | None) -> None:
    assert number_in(verdict, JudgeConfig(prompt="{response}", **options)) == number
