"""The config models. Nothing heavy is imported here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from drivetrain import Problem, RewardConfig

if TYPE_CHECKING:
    from drivetrain import RunConfig
    from drivetrain.seam.registry import Registry

PLACEHOLDER = re.compile(r"\{(\w+)\}")
OWN_FIELDS = ("messages", "model", "temperature", "max_tokens", "stream", "n")

JUDGE_TEMPLATE = """\
Judge how well the response answers the prompt.

[Prompt]
{prompt}

[Response]
{response}

Reason briefly. Then end with one line "Score: N", where N is a number from {minimum} to {maximum}."""

PREFERENCE_TEMPLATE = """\
Compare two responses to one prompt.

[Prompt]
{prompt}

[Response A]
{response_a}

[Response B]
{response_b}

Which one answers the prompt better? Reason briefly. Then end with one line, "Verdict: A", "Verdict: B" or
"Verdict: tie"."""


class EndpointConfig(RewardConfig):
    """A reward that asks a language model over an OpenAI-compatible endpoint."""

    takes: ClassVar[tuple[str, ...]]  # placeholders of the template
    needs: ClassVar[tuple[str, ...]]  # those that it has to have
    default_pattern: ClassVar[str]

    timeout_s: float = Field(600.0, gt=0, description="A call for one batch that takes longer stops the run.")
    base_url: str = Field(description="Where the API is, up to what precedes /chat/completions.")
    model: str = Field(min_length=1, description="Name of the model, as the endpoint knows it.")
    api_key_env: str | None = Field(
        None, description="Name of the environment variable that holds the API key. Omitted: no key is sent."
    )
    system_prompt: str | None = Field(None, description="A system message before the template. Omitted: none.")
    template: str = Field(description="The user message, with placeholders such as {prompt}.")
    pattern: str | None = Field(
        None, description="Regular expression; the one group of its last match is the verdict. Omitted: fits the "
        "template that is the default."
    )  # fmt: skip
    json_key: str | None = Field(
        None, description="Take the verdict from this key of the last JSON object that has it, in place of pattern."
    )
    temperature: float | None = Field(0.0, ge=0, description="Of the judge. null: the endpoint's default.")
    max_tokens: int | None = Field(1024, gt=0, description="Longest verdict, in tokens. null: the endpoint's default.")
    extra_body: dict[str, Any] = Field(default_factory=dict, description="Further fields of the request.")
    max_concurrency: int = Field(32, gt=0, le=1000, description="Requests in flight at once.")
    requests_per_minute: float | None = Field(
        None, gt=0, description="Requests are sent at equal intervals, at most so many a minute, retries counted."
    )
    max_retries: int = Field(
        5,
        ge=0,
        description="Times that a request is sent again after 408, 409, 429, 5xx, a timeout or a lost connection.",
    )
    request_timeout_s: float = Field(120.0, gt=0, description="Longest silence of the endpoint, in one request.")
    verdict_retries: int = Field(2, ge=0, description="Times that a verdict which cannot be read is asked for again.")

    @field_validator("base_url")
    @classmethod
    def _plain_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("base_url has to begin with http:// or https:// and a host")
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError("base_url holds a user, a query or a fragment; a key belongs into the environment "
                             "variable that api_key_env names")  # fmt: skip
        return url.rstrip("/")

    @field_validator("api_key_env")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError("api_key_env is the name of an environment variable, not a key")
        return name

    @field_validator("template")
    @classmethod
    def _placeholders(cls, template: str) -> str:
        found = PLACEHOLDER.findall(template)
        if unknown := [name for name in found if name not in cls.takes]:
            raise ValueError(f"the template has no placeholder {{{unknown[0]}}}; it takes {_braced(cls.takes)}")
        if missing := [name for name in cls.needs if name not in found]:
            raise ValueError(f"the template lacks {_braced(missing)}")
        return template

    @field_validator("pattern")
    @classmethod
    def _one_group(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                groups = re.compile(pattern).groups
            except re.error as error:
                raise ValueError(f"no regular expression: {error}") from error
            if groups != 1:
                raise ValueError(f"the pattern has {groups} groups (...); one has to mark the verdict")
        return pattern

    @field_validator("extra_body")
    @classmethod
    def _further_fields(cls, fields: dict[str, Any]) -> dict[str, Any]:
        if taken := [name for name in OWN_FIELDS if name in fields]:
            raise ValueError(f"extra_body cannot set {', '.join(taken)}")
        return fields

    @model_validator(mode="after")
    def _one_way_to_read(self) -> EndpointConfig:
        if self.pattern is not None and self.json_key is not None:
            raise ValueError("set pattern or json_key, not both")
        return self

    @property
    def url(self) -> str:
        """Where requests go."""
        return f"{self.base_url}/chat/completions"


class LLMJudgeConfig(EndpointConfig):
    """The reward ``llm_judge``."""

    takes = ("prompt", "response", "answer", "minimum", "maximum")
    needs = ("response",)
    default_pattern = r"Score:[\s*]*(-?\d+(?:\.\d+)?)"

    template: str = Field(
        JUDGE_TEMPLATE, description="The user message, with {prompt}, {response}, {answer}, {minimum}, {maximum}."
    )
    minimum: float = Field(0.0, allow_inf_nan=False, description="Lowest number that the judge may give.")
    maximum: float = Field(10.0, allow_inf_nan=False, description="Highest number that the judge may give.")
    scale: tuple[float, float] | None = Field(
        (0.0, 1.0), description="What minimum and maximum are worth; between them linear. null: the judge's number."
    )
    correct_above: float | None = Field(
        None, description="A response is right if the judge's number is greater, else wrong. Omitted: neither."
    )

    @model_validator(mode="after")
    def _range_in_order(self) -> LLMJudgeConfig:
        if self.minimum >= self.maximum:
            raise ValueError("minimum must be less than maximum")
        if self.correct_above is not None and not self.minimum <= self.correct_above < self.maximum:
            raise ValueError("correct_above must be at least minimum and less than maximum")
        return self


class LLMPreferenceConfig(EndpointConfig):
    """The reward ``llm_preference``."""

    takes = ("prompt", "response_a", "response_b", "answer")
    needs = ("response_a", "response_b")
    default_pattern = r"(?i)Verdict:[\s*]*(A|B|tie)\b"

    template: str = Field(
        PREFERENCE_TEMPLATE, description="The user message, with {prompt}, {response_a}, {response_b}, {answer}."
    )
    opponents: int | None = Field(
        None, gt=0, multiple_of=2, description="Compare each sample with so many others of its prompt, an even number. "
        "Omitted: with all."
    )  # fmt: skip
    seed: int = Field(0, description="Draws who is compared with whom, where opponents leaves pairs out.")

    def check(self, run: RunConfig, registry: Registry) -> Iterable[Problem]:
        if run.algorithm.samples_per_prompt() < 2:
            yield Problem(key="name", what=f"algorithm {run.algorithm.name!r} draws one sample a prompt, so that "
                          "llm_preference has nothing to compare", mend="draw several, or take llm_judge")  # fmt: skip


def _braced(names: Iterable[str]) -> str:
    return ", ".join(f"{{{name}}}" for name in names)
