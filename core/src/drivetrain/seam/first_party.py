"""Which distribution offers which name, for the hint ``pip install ...`` in errors. Nothing else reads this table."""

from __future__ import annotations

FIRST_PARTY: dict[str, dict[str, str]] = {
    "algorithms": {"grpo": "drivetrain-algo-grpo", "ppo": "drivetrain-algo-ppo", "sft": "drivetrain-algo-sft"},
    "backends": {"fsdp": "drivetrain-backend-fsdp"},
    "optimizers": {"adamw": "drivetrain-backend-fsdp"},
    "rollouts": {"hf": "drivetrain-rollout-hf"},
    "hybrid_engines": {"colocated": "drivetrain-hybrid-engine"},
    "weight_transports": {name: "drivetrain-hybrid-engine" for name in ("in_process", "gloo", "nccl")},
    "advantage_estimators": {"grpo": "drivetrain-algo-grpo"},
    "policy_losses": {"nll": "drivetrain-algo-sft"},
    "hardware": {"cuda": "drivetrain-hardware-cuda"},
    "datasets": {name: "drivetrain-tasks" for name in ("reasoning_gym", "parquet", "csv", "huggingface")},
    "rewards": {name: "drivetrain-tasks" for name in ("reasoning_gym", "gsm8k", "math_verify", "format", "length")},
    "trackers": {"console": "drivetrain-report", "report": "drivetrain-report"},
    "commands": {"report": "drivetrain-report"},
}
