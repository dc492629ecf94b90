"""Requests as they come and go, and what is refused or fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from rig_vllm import ATOL, Served, furthest, plain_log_probs, request

from drivetrain import Completion, GenerationRequest, RunError, UserError

ON = {"ignore_eos": True}


async def collect(served: Served, asked: GenerationRequest, into: list[Completion] | None = None) -> list[Completion]:
    got = [] if into is None else into
    async for completion in served.engine.generate(asked):
        got.append(completion)
    return got


async def until(done: Callable[[], bool]) -> None:
    """Let others go on, for at most a thousand turns."""
    for _ in range(1000):
        if done():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not happen")


def drawn(served: Served, name: str) -> int:
    """How many tokens the first sample of a request under way has."""
    tokens: int = served.engine._state(f"{name}#0").detokenizer.num_output_tokens()
    return tokens


def test_completions_come_as_they_end(llama: Served) -> None:
    order: list[str] = []

    async def one(name: str, tokens: int, seeds: int) -> None:
        async for completion in llama.engine.generate(request([5, 6], name, range(seeds), max_tokens=tokens, **ON)):
            order.append(f"{completion.request_id}{completion.sample}")

    async def everything() -> None:
        long = asyncio.create_task(one("long", 60, 2))
        await until(lambda: "long" in llama.engine._jobs and drawn(llama, "long") > 3)
        await asyncio.gather(one("short", 5, 2), long)

    asyncio.run(everything())
    assert order[:2] == ["short0", "short1"] and sorted(order[2:]) == ["long0", "long1"]


def test_samples_of_a_request_come_as_they_end(llama: Served) -> None:
    got = asyncio.run(collect(llama, request([7, 8, 9], "r", range(40), max_tokens=40, temperature=1.5)))
    lengths = [len(completion.token_ids) for completion in got]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    assert sorted(completion.sample for completion in got) == list(range(40))


def test_abort_yields_what_there_is_and_leaves_others_alone(served: Served) -> None:
    asked = [request([5 + at, 6], f"r{at}", (1, 2), max_tokens=100, **ON) for at in range(3)]
    undisturbed = served.engine.generate_batch(asked)

    async def everything() -> list[list[Completion]]:
        tasks = [asyncio.create_task(collect(served, one)) for one in asked]
        await until(lambda: "r2" in served.engine._jobs and drawn(served, "r1") > 10)
        await served.engine.abort("r1")
        await served.engine.abort("r1")
        await served.engine.abort("unknown")
        return await asyncio.gather(*tasks)

    got = asyncio.run(everything())
    for before, now in zip(undisturbed, got, strict=True):
        for whole, part in zip(before, sorted(now, key=lambda c: c.sample), strict=True):
            aborted = part.request_id == "r1"
            assert part.finish_reason == ("abort" if aborted else "length")
            assert 10 < len(part.token_ids) < 100 if aborted else len(part.token_ids) == 100
            assert part.token_ids == whole.token_ids[: len(part.token_ids)]
            assert part.log_probs == pytest.approx(whole.log_probs[: len(part.log_probs)], abs=ATOL)
    assert not served.engine._engine.has_unfinished_requests()


def test_a_request_that_nobody_waits_for_any_more_ends(llama: Served) -> None:
    async def everything() -> None:
        waiting = asyncio.create_task(collect(llama, request([5], "left", max_tokens=400, **ON)))
        await until(lambda: "left" in llama.engine._jobs and drawn(llama, "left") > 2)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert "left" not in llama.engine._jobs and not llama.engine._engine.has_unfinished_requests()
        again = await collect(llama, request([5], "left", max_tokens=3, **ON))
        assert len(again[0].token_ids) == 3

    asyncio.run(everything())


def test_paused_nothing_is_drawn_and_weights_that_come_meanwhile_are_told(served: Served) -> None:
    """Tokens before the update are by the weights before it, tokens after it by those after it."""
    asked = [request([30 + at, 6], f"r{at}", (3, 4), max_tokens=60, **ON) for at in range(2)]
    before = served.model

    async def everything() -> list[list[Completion]]:
        tasks = [asyncio.create_task(collect(served, one)) for one in asked]
        await until(lambda: "r1" in served.engine._jobs and drawn(served, "r0") > 20)
        await served.engine.pause()
        await asyncio.sleep(0)
        held = drawn(served, "r0")
        for _ in range(10):
            await asyncio.sleep(0)
        assert drawn(served, "r0") == held
        served.load(2, 9)
        await served.engine.resume()
        return await asyncio.gather(*tasks)

    got = asyncio.run(everything())
    for one, completions in zip(asked, got, strict=True):
        for completion in completions:
            (zero, first), (change, second) = completion.weight_versions
            assert (zero, first, second) == (0, 1, 9) and 20 < change < 60 == len(completion.token_ids)
            for model, part in ((before, slice(0, change)), (served.model, slice(change, None))):
                expected = plain_log_probs(model, one, completion)[part]
                assert completion.log_probs[part] == pytest.approx(expected, abs=ATOL)


REFUSED: list[tuple[GenerationRequest, str]] = [
    (request([], "r"), "the prompt of request 'r' is empty"),
    (request([5, 128], "r"), "request 'r' has tokens 5 to 128; the model has 0 to 127"),
    (request([5, -1], "r"), "request 'r' has tokens -1 to 5"),
    (request([5] * 500, "r", max_tokens=13), "500 tokens and a response of up to 13 exceed the engine's 512"),
    (request([5], "r", max_tokens=4, min_p=2.0), "vLLM refuses request 'r': .*min_p"),
    (request([5], "r", range(3), max_tokens=4, temperature=-1.0), "vLLM refuses request 'r': .*temperature"),
]  # fmt: skip


@pytest.mark.parametrize("asked, message", REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_requests_that_are_refused(asked: GenerationRequest, message: str, llama: Served) -> None:
    """And those beside them go on."""

    async def everything() -> list[Completion]:
        other = asyncio.create_task(collect(llama, request([5, 6], "other", max_tokens=20, **ON)))
        await until(lambda: "other" in llama.engine._jobs)
        with pytest.raises(UserError, match=message):
            await collect(llama, asked)
        return await other

    (completion,) = asyncio.run(everything())
    assert len(completion.token_ids) == 20
    assert not llama.engine._jobs and not llama.engine._engine.has_unfinished_requests()


def test_the_longest_that_fits(llama: Served) -> None:
    asked = [request([5] * 499, "r", max_tokens=13, **ON)]
    got = llama.engine.generate_batch(asked)
    assert len(got[0][0].token_ids) == 13
    assert furthest(llama.model, asked, got) < ATOL


def test_one_request_of_a_name_at_a_time(llama: Served) -> None:
    async def everything() -> list[Completion]:
        first = asyncio.create_task(collect(llama, request([5], "same", max_tokens=30, **ON)))
        await until(lambda: "same" in llama.engine._jobs)
        with pytest.raises(UserError, match="a request 'same' is under way already"):
            await collect(llama, request([6], "same"))
        return await first

    (completion,) = asyncio.run(everything())
    assert len(completion.token_ids) == 30


def test_nothing_sleeps_under_a_request(llama: Served) -> None:
    async def everything() -> list[Completion]:
        going = asyncio.create_task(collect(llama, request([5], "r", max_tokens=30, **ON)))
        await until(lambda: "r" in llama.engine._jobs)
        with pytest.raises(RunError, match="1 requests are under way, first 'r'"):
            llama.engine.sleep()
        return await going

    (completion,) = asyncio.run(everything())
    assert len(completion.token_ids) == 30


def test_a_failure_of_vllm_reaches_every_request_with_its_cause(served: Served) -> None:
    """Raised in the model's forward call while requests are under way; weights make the engine usable again."""
    calls = 0

    def fail(module: Any, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise ArithmeticError("a kernel gave up")

    async def everything() -> list[Any]:
        asked = [request([5 + at], f"r{at}", (1, 2), max_tokens=50, **ON) for at in range(5)]
        tasks: list[Awaitable[Any]] = [asyncio.create_task(collect(served, one)) for one in asked]
        return await asyncio.gather(*tasks, return_exceptions=True)

    hook = served.module.register_forward_pre_hook(fail)
    errors = asyncio.run(everything())
    hook.remove()
    message = "vLLM failed at requests r0, r1, r2 and 2 more: ArithmeticError: a kernel gave up"
    for error in errors:
        assert isinstance(error, RunError) and message in str(error)
        assert isinstance(error.__cause__, ArithmeticError)
    with pytest.raises(RunError, match="cannot generate: vLLM failed: ArithmeticError: a kernel gave up"):
        served.draw([5])
    assert not served.engine._engine.has_unfinished_requests()
    served.load(1, 2)
    asked = [request([5 + at], f"r{at}", (1, 2), max_tokens=20) for at in range(5)]
    assert furthest(served.model, asked, served.engine.generate_batch(asked)) < ATOL


def test_an_error_that_only_vllm_finds_while_it_runs(llama: Served) -> None:
    """Logits that are not numbers: its log-probs are told as they are, and the worker that asked refuses them."""
    with torch.no_grad():
        broken = dict(llama.model.state_dict())
        broken["model.norm.weight"] = broken["model.norm.weight"] * torch.nan
    llama.send([(name, tensor, None) for name, tensor in broken.items()], 2)
    (got,) = llama.draw([5], max_tokens=2, **ON)
    assert not all(torch.isfinite(torch.tensor(got.log_probs)))
