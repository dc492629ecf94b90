"""Between batches of rows and the requests and completions of a rollout engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from drivetrain.config import RolloutConfig
from drivetrain.contracts.rollout import Completion, GenerationRequest, SamplingParams
from drivetrain.errors import NonFiniteError
from drivetrain.protocol import DataProto
from drivetrain.seeds import derive_seed


def sampling_of(config: RolloutConfig, temperature: float) -> SamplingParams:
    """How tokens are drawn by a section ``rollout``, with this temperature."""
    return SamplingParams(
        temperature=temperature, top_k=config.top_k, top_p=config.top_p, min_p=config.min_p,
        max_tokens=config.max_response_tokens, min_tokens=config.min_response_tokens,
        stop_token_ids=config.stop_token_ids, stop=config.stop, ignore_eos=config.ignore_eos,
    )  # fmt: skip


def requests_of(prompts: DataProto, config: RolloutConfig, *, seed: int, part: int = 0) -> list[GenerationRequest]:
    """One request a prompt; ``prompts`` is as ``generate_sequences`` takes it, and the part of that number of a batch.

    Without ``uid`` the seeds follow from the part and the row, so that no two rows of the batch share one.
    """
    meta = prompts.meta_info
    samples, step = int(meta.get("samples", 1)), int(meta.get("step", 0))
    rows = [f"{part}/{row}" if part else str(row) for row in range(len(prompts))]
    uids = prompts.non_tensor_batch.get("uid", rows)
    sampling = sampling_of(config, float(meta.get("temperature", config.temperature)))
    ids, mask = prompts.batch["input_ids"], prompts.batch["attention_mask"].bool()
    return [
        GenerationRequest(
            request_id=f"{step}/{uid}/{row}", prompt_token_ids=tuple(ids[row][mask[row]].tolist()),
            seeds=tuple(derive_seed(seed, step, str(uid), sample) for sample in range(samples)), sampling=sampling,
        )
        for row, uid in enumerate(uids)
    ]  # fmt: skip


def completions_to_batch(
    prompts: DataProto,
    completions: Sequence[Sequence[Completion]],
    config: RolloutConfig,
    *,
    pad_token_id: int,
) -> DataProto:
    """One row a completion; responses are right padded to the longest that was allowed, so that ranks agree."""
    samples = int(prompts.meta_info.get("samples", 1))
    flat = [completion for group in completions for completion in group]
    shape = (len(flat), config.max_response_tokens)
    responses = np.full(shape, pad_token_id, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.int64)
    log_probs = np.zeros(shape, dtype=np.float32)
    for row, completion in enumerate(flat):
        length = len(completion.token_ids)
        responses[row, :length] = completion.token_ids
        log_probs[row, :length] = completion.log_probs
        mask[row, :length] = 1
    if bad := int((~np.isfinite(log_probs)).any(axis=1).sum()):
        raise NonFiniteError(f"log-probs of {bad} of {len(flat)} completions are not finite; no weight was changed",
                             where=f"rollout {config.name}", mend="look at the weights of the policy")  # fmt: skip
    rows = prompts.repeat(samples, interleave=True)
    prompt_ids, prompt_mask = rows.batch["input_ids"], rows.batch["attention_mask"]
    response_ids, response_mask = torch.from_numpy(responses), torch.from_numpy(mask)
    return DataProto.from_dict(
        {
            "prompts": prompt_ids,
            "responses": response_ids,
            "input_ids": torch.cat([prompt_ids, response_ids], dim=1),
            "attention_mask": torch.cat([prompt_mask, response_mask], dim=1),
            "response_mask": response_mask,
            "rollout_log_probs": torch.from_numpy(log_probs),
        },
        {
            **rows.non_tensor_batch,
            "sample_index": np.array([c.sample for c in flat], dtype=np.int64),
            "finish_reason": np.array([c.finish_reason for c in flat], dtype=object),
            "weight_version": np.array([c.weight_versions[-1][1] for c in flat], dtype=np.int64),
        },
    )
