"""The worker of a reward model that generates its verdict, on any rollout engine with weights of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from drivetrain.contracts.rollout import GenerationRequest, RolloutContext, RolloutEngine, SamplingParams
from drivetrain.driver.text import decode_tokens, load_tokenizer
from drivetrain.errors import UserError
from drivetrain.protocol import DataProto
from drivetrain.seam.registry import resolve
from drivetrain.seeds import derive_seed
from drivetrain.workers.generation import sampling_of
from drivetrain.workers.model_worker import ModelWorker
from drivetrain.workers.registration import register


class GenerativeRewardWorker(ModelWorker):
    """Plays ``reward``: answers questions about prompts and responses with a language model that does not learn."""

    engine: RolloutEngine | None = None

    @register()
    def init_model(self) -> str:
        """Load the model and draw a token. Returns the name of the device.

        Raises:
            UserError: the folder has no tokenizer, or no model that the engine can generate with.
        """
        section = self.config.reward_model
        assert section is not None and section.rollout is not None
        self.tokenizer: Any = load_tokenizer(section.model)
        self.sampling = sampling_of(section.rollout, section.rollout.temperature)
        context = RolloutContext(model=section.model, hardware=self.hardware, rank=self.rank,
                                 world_size=self.world_size, seed=self.config.trainer.seed)  # fmt: skip
        self.engine = resolve("rollouts", section.rollout.name)(section.rollout, context)
        try:
            self.engine.initialize()
        except UserError as error:
            raise _of_reward_model(error) from error
        self._answers(["1"], 0, replace(self.sampling, max_tokens=1, min_tokens=0))
        return self.device_name

    @register("dp_compute_proto", mesh="rollout")
    def generate_verdicts(self, questions: DataProto) -> DataProto:
        """``verdict`` (rows,), as text, of each ``question``, also text; ``meta_info`` may hold ``attempt``.

        The seed of a verdict follows from the run's seed, the question and the attempt, so that one question has one
        verdict wherever and whenever it is asked.

        Raises:
            UserError: a question is longer than the engine can take.
        """
        answers = self._answers(
            questions["question"].tolist(), int(questions.meta_info.get("attempt", 0)), self.sampling
        )
        return DataProto.from_dict({}, {"verdict": answers})

    def _answers(self, questions: Sequence[str], attempt: int, sampling: SamplingParams) -> list[str]:
        assert self.engine is not None
        requests = [
            GenerationRequest(request_id=str(row), prompt_token_ids=tuple(self._tokens(question)), sampling=sampling,
                              seeds=(derive_seed(self.config.trainer.seed, "verdict", attempt, question),))
            for row, question in enumerate(questions)
        ]  # fmt: skip
        try:
            drawn = self.engine.generate_batch(requests)
        except UserError as error:
            raise _of_reward_model(error) from error
        return decode_tokens([completion.token_ids for (completion,) in drawn], self.tokenizer)

    def _tokens(self, question: str) -> list[int]:
        """A question by the chat template, which writes all special tokens itself, else by the tokenizer alone."""
        chat = bool(getattr(self.tokenizer, "chat_template", None))
        if chat:
            message = {"role": "user", "content": question}
            question = self.tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        tokens: list[int] = self.tokenizer(question, add_special_tokens=not chat, verbose=False)["input_ids"]
        return tokens

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        super().close()


def _of_reward_model(error: UserError) -> UserError:
    """An error of the engine, which does not know in whose section it stands."""
    return UserError(error.what, where=f"reward_model.{error.where}".rstrip("."), mend=error.mend)
