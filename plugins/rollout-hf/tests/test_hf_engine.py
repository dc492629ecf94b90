"""Requests under way: abort, pause, errors; and the module that is shared with a trainer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
import transformers
from tiny_hf import one, request, tiny
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from drivetrain import Completion, DrivetrainError, GenerationRequest, UserError


async def collect(engine: Any, asked: GenerationRequest) -> list[Completion]:
    return [got async for got in engine.generate(asked)]


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


LONG = {"max_tokens": 40, "ignore_eos": True}


def test_completions_come_as_they_finish(make_engine: Any) -> None:
    engine = make_engine(tiny())
    asked = request([5, 6], seeds=range(16), max_tokens=40)
    lengths = [len(got.token_ids) for got in asyncio.run(collect(engine, asked))]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]


def test_abort_in_mid_generation(make_engine: Any) -> None:
    engine = make_engine(tiny(), max_batch_sequences=3)
    whole = engine.generate_batch([request([5], "a", seeds=(1, 2), **LONG), request([6], "b", seeds=(3, 4), **LONG)])

    async def main() -> tuple[list[Completion], list[Completion]]:
        first = asyncio.create_task(collect(engine, request([5], "a", seeds=(1, 2), **LONG)))
        other = asyncio.create_task(collect(engine, request([6], "b", seeds=(3, 4), **LONG)))
        await turns(10)
        await engine.abort("b")
        await engine.abort("nobody")
        return await first, await other

    first, other = asyncio.run(main())
    assert sorted(first, key=lambda got: got.sample) == whole[0]
    assert [got.finish_reason for got in other] == ["abort", "abort"]
    cut, never_begun = sorted(other, key=lambda got: got.sample)
    assert 0 < len(cut.token_ids) < 40
    assert cut.token_ids == whole[1][0].token_ids[: len(cut.token_ids)]
    assert (never_begun.token_ids, never_begun.log_probs, never_begun.weight_versions) == ((), (), ())


def test_leaving_a_request_frees_its_rows(make_engine: Any) -> None:
    model = tiny()
    engine = make_engine(model)

    async def main() -> None:
        task = asyncio.create_task(collect(engine, request([5], "a", seeds=range(4), **LONG)))
        other = asyncio.create_task(collect(engine, request([6], "b", **LONG)))
        await turns(8)
        task.cancel()
        await turns(3)
        assert len(engine._decoder.rows) == 1
        assert len((await other)[0].token_ids) == 40

    asyncio.run(main())


def test_pause_and_resume_in_mid_generation(make_engine: Any) -> None:
    model = tiny()
    model.train()
    engine = make_engine(model)
    expected = one(engine, [5, 6], **LONG)
    calls = []
    model.register_forward_pre_hook(lambda *args: calls.append(model.training))

    async def main() -> Completion:
        task = asyncio.create_task(collect(engine, request([5, 6], **LONG)))
        await turns(12)
        await engine.pause()
        assert model.training, "a paused engine leaves the module as it was"
        before = len(calls)
        assert 0 < before < 40
        await turns(20)
        assert len(calls) == before and not task.done()
        engine.weight_version = 7
        await engine.resume()
        return (await task)[0]

    got = asyncio.run(main())
    assert (got.token_ids, got.log_probs) == (expected.token_ids, expected.log_probs)
    (begin, old), (turned, new) = got.weight_versions
    assert (begin, old, new) == (0, 0, 7) and 0 < turned < 40
    assert calls == [False] * 40 and model.training


def test_pause_before_requests_and_abort_while_paused(make_engine: Any) -> None:
    engine = make_engine(tiny())

    async def main() -> list[Completion]:
        await engine.pause()
        task = asyncio.create_task(collect(engine, request([5], "a", seeds=(1, 2), **LONG)))
        await turns(5)
        await engine.abort("a")
        gone = await task
        other = asyncio.create_task(collect(engine, request([5], "b", max_tokens=3, ignore_eos=True)))
        await turns(5)
        await engine.resume()
        assert len((await other)[0].token_ids) == 3
        return gone

    assert [got.finish_reason for got in asyncio.run(main())] == ["abort", "abort"]


def test_an_error_reaches_every_request_under_way_and_the_engine_goes_on(make_engine: Any) -> None:
    model = tiny()
    engine = make_engine(model)
    handle = model.lm_head.register_forward_pre_hook(lambda *args: (_ for _ in ()).throw(OSError("broken")))

    async def main() -> list[Any]:
        asked = [request([5], str(place)) for place in range(3)]
        return await asyncio.gather(*(collect(engine, each) for each in asked), return_exceptions=True)

    assert [str(error) for error in asyncio.run(main())] == ["broken"] * 3
    handle.remove()
    assert len(one(engine, [5], max_tokens=3, ignore_eos=True).token_ids) == 3


def test_requests_that_the_model_cannot_serve(make_engine: Any) -> None:
    engine = make_engine(tiny())
    with pytest.raises(UserError, match=r"60 tokens and a response of up to 5 exceed the model's 64 positions") as told:
        one(engine, [5] * 60, max_tokens=5)
    assert "at most 59 tokens" in str(told.value)
    assert len(one(engine, [5] * 59, max_tokens=5, ignore_eos=True).token_ids) == 5
    for prompt in ([], [32], [-1, 4]):
        with pytest.raises(UserError, match="prompt"):
            one(engine, prompt)
    with pytest.raises(UserError, match="max_tokens"):
        one(engine, [5], max_tokens=0)
    with pytest.raises(UserError, match="under way"):
        engine.generate_batch([request([5], "a"), request([5], "a")])


def test_models_without_keys_and_values_are_refused(make_engine: Any) -> None:
    config = transformers.MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(UserError, match="attention layers only"):
        make_engine(transformers.MambaForCausalLM(config))


def test_attached_module_is_shared_not_copied(make_engine: Any) -> None:
    model = tiny()
    engine = make_engine(model)
    before = one(engine, [5, 6], **LONG)
    assert one(engine, [5, 6], **LONG) == before
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
        model.model.layers[0].mlp.up_proj.weight.add_(0.05)
    after = one(engine, [5, 6], **LONG)
    assert after.token_ids != before.token_ids
    assert after.token_ids == one(make_engine(model), [5, 6], **LONG).token_ids


def test_a_module_in_training_with_checkpointing_is_left_as_it_was(make_engine: Any) -> None:
    model = tiny("qwen2", attention_dropout=0.5)
    engine = make_engine(model)
    expected = one(engine, [5, 6, 7], **LONG)
    model.gradient_checkpointing_enable()
    model.train()
    model.model.norm.eval()
    assert one(engine, [5, 6, 7], **LONG) == expected
    assert model.training and model.model.layers[1].self_attn.training and not model.model.norm.training
    model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_custom_attention_that_behaves_as_sdpa(make_engine: Any) -> None:
    used = []

    def attention(*args: Any, **kwargs: Any) -> Any:
        used.append(1)
        return sdpa_attention_forward(*args, **kwargs)

    asked = [request([5, 6, 7], "a", **LONG), request([8], "b", **LONG)]
    expected = make_engine(tiny()).generate_batch(asked)
    AttentionInterface.register("test_attention", attention)
    model = tiny()
    model.set_attn_implementation("test_attention")
    with pytest.raises(DrivetrainError, match="no mask function"):
        make_engine(model)
    AttentionMaskInterface.register("test_attention", sdpa_mask)
    assert make_engine(model).generate_batch(asked) == expected
    assert used


def test_attach_after_initialize_and_not_under_way(make_engine: Any) -> None:
    first, second = tiny(), tiny(seed=1)
    engine = make_engine(first, own=True)
    engine.attach(second)
    assert one(engine, [5], **LONG) == one(make_engine(second), [5], **LONG)

    async def main() -> None:
        task = asyncio.create_task(collect(engine, request([5], **LONG)))
        await turns(3)
        with pytest.raises(DrivetrainError, match="under way"):
            engine.attach(first)
        await task

    asyncio.run(main())


def test_close_ends_requests_under_way(make_engine: Any) -> None:
    engine = make_engine(tiny())

    async def main() -> None:
        task = asyncio.create_task(collect(engine, request([5], **LONG)))
        await turns(3)
        engine.close()
        with pytest.raises(DrivetrainError, match="stopped"):
            await task

    asyncio.run(main())
