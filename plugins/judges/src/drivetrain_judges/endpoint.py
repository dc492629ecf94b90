"""Requests to an OpenAI-compatible endpoint: many at once, within limits, sent again where that may help."""

from __future__ import annotations

import asyncio
import json
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import openai
from aiolimiter import AsyncLimiter

from drivetrain import SampleError, UserError
from drivetrain_judges.texts import find_verdict

if TYPE_CHECKING:
    from drivetrain_judges.configs import EndpointConfig


class JudgeError(Exception):
    """The endpoint failed for good, or its verdict cannot be read. The text says where, how, and what to do."""


class Endpoint:
    """Asks a model for verdicts.

    Args:
        config: where and how to ask.
        read: turns a verdict's text into a number; None if it is no verdict.
    """

    def __init__(self, config: EndpointConfig, read: Callable[[str], float | None]) -> None:
        """Take the key from the environment. Raises UserError when it is not there."""
        self._config, self._read, self._key = config, read, _key(config)
        # One loop for all batches: the limiter's clock goes on between them.
        self._loop = asyncio.new_event_loop()
        weakref.finalize(self, _close, self._loop)
        rate = config.requests_per_minute
        self._limiter = AsyncLimiter(1, 60 / rate) if rate is not None else None

    def ask(self, texts: Sequence[str], owners: Sequence[int]) -> list[float]:
        """The verdicts, in order; equal texts are asked once. After the first failure no more is asked.

        Args:
            texts: user messages.
            owners: for each text, the position of the sample that an error shows.

        Raises:
            SampleError: by JudgeError.
        """
        first: dict[str, int] = {}
        for text, owner in zip(texts, owners, strict=True):
            first.setdefault(text, owner)
        verdicts = self._loop.run_until_complete(self._ask_all(first))
        return [verdicts[text] for text in texts]

    async def _ask_all(self, owners: Mapping[str, int]) -> dict[str, float]:
        config = self._config
        transport = openai.DefaultAsyncHttpxClient(event_hooks={"request": [self._wait_for_turn]})
        async with openai.AsyncOpenAI(
            base_url=config.base_url, api_key=self._key or "none", http_client=transport,
            max_retries=config.max_retries, timeout=config.request_timeout_s,
        ) as client:  # fmt: skip
            slots = asyncio.Semaphore(config.max_concurrency)
            tasks = [asyncio.ensure_future(self._ask(client, slots, text, at)) for text, at in owners.items()]
            try:
                return dict(zip(owners, await asyncio.gather(*tasks), strict=True))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_for_turn(self, _: object) -> None:
        """Before each request that is sent, those that are sent again among them."""
        if self._limiter is not None:
            await self._limiter.acquire()

    async def _ask(self, client: openai.AsyncOpenAI, slots: asyncio.Semaphore, text: str, owner: int) -> float:
        async with slots:
            try:
                return await self._verdict(client, text)
            except JudgeError as error:
                raise SampleError(owner) from error

    async def _verdict(self, client: openai.AsyncOpenAI, text: str) -> float:
        config = self._config
        said, ended = "", ""
        for _ in range(1 + config.verdict_retries):
            said, ended = await self._answer(client, text)
            verdict = find_verdict(said, config)
            number = self._read(verdict) if verdict is not None else None
            if number is not None:
                return number
        times = f"{1 + config.verdict_retries} answers, the last {self._shown(said)} (finish_reason {ended})"
        mend = "raise max_tokens" if ended == "length" else "mend template, pattern or json_key"
        raise JudgeError(f"no verdict can be read from {config.url} in {times}; {mend}")

    async def _answer(self, client: openai.AsyncOpenAI, text: str) -> tuple[str, str]:
        """What the model said, and why it ended."""
        config = self._config
        messages = [{"role": "system", "content": config.system_prompt}] if config.system_prompt is not None else []
        given = {"temperature": config.temperature, "max_tokens": config.max_tokens}
        request: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if self._key is None:  # the client insists on one, and would send it
            request["extra_headers"] = {"Authorization": openai.Omit()}
        try:
            reply: Any = await client.chat.completions.create(
                model=config.model, messages=[*messages, {"role": "user", "content": text}],  # type: ignore[list-item]
                extra_body=config.extra_body, **request,
            )  # fmt: skip
        except openai.APIStatusError as error:
            shown = self._shown(error.response.text)
            raise self._failed(f"answered {error.status_code}: {shown}", _mend(error.status_code, config)) from error
        except openai.APITimeoutError as error:
            what = f"was silent for request_timeout_s={config.request_timeout_s:g}"
            raise self._failed(what, "raise it, lower max_concurrency, or see to the server") from error
        except openai.APIConnectionError as error:
            shown = self._shown(str(error.__cause__ or error))
            raise self._failed(f"cannot be reached: {shown}", "set base_url, or start the server") from error
        except (openai.OpenAIError, json.JSONDecodeError) as error:
            raise self._no_completion(error) from error
        try:
            return reply.choices[0].message.content or "", str(reply.choices[0].finish_reason)
        except (AttributeError, IndexError, TypeError) as error:
            raise self._no_completion(reply) from error

    def _no_completion(self, found: object) -> JudgeError:
        mend = "set base_url to an OpenAI-compatible endpoint, most often ending in /v1"
        return self._failed(f"answered what is no chat completion: {self._shown(str(found))}", mend)

    def _failed(self, what: str, mend: str) -> JudgeError:
        return JudgeError(f"{self._config.url} {what} (max_retries={self._config.max_retries}); {mend}")

    def _shown(self, text: str) -> str:
        """A text of the endpoint's, shortened, without the key."""
        text = " ".join(text.split())
        if self._key is not None:
            text = text.replace(self._key, "***")
        return repr(text if len(text) <= 200 else f"{text[:100]} ... {text[-95:]}")


def _mend(status: int, config: EndpointConfig) -> str:
    if status in (401, 403):
        return f"mend the key in {config.api_key_env}" if config.api_key_env else "set api_key_env"
    if status == 404:
        return "mend base_url or model"
    if status == 429:
        return "set requests_per_minute, lower max_concurrency, or see to the account's quota"
    if status >= 500 or status in (408, 409):
        return "see the server's log, or raise max_retries"
    return "mend model, max_tokens, temperature or extra_body"


def _key(config: EndpointConfig) -> str | None:
    if config.api_key_env is None:
        return None
    key, where = os.environ.get(config.api_key_env, "").strip(), f"rewards: {config.label or config.name}.api_key_env"
    if not key:
        raise UserError(f"the environment variable {config.api_key_env} is not set, or empty", where=where,
                        mend=f"export {config.api_key_env}=...")  # fmt: skip
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise UserError(f"the environment variable {config.api_key_env} holds characters that no key has", where=where,
                        mend="set it to the key alone")  # fmt: skip
    return key


def _close(loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_running():  # as it is at exit after a batch that took too long
        loop.close()
