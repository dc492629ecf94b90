"""Which distribution offers which name, for the hint ``pip install ...`` in errors. Nothing else reads this table."""

from __future__ import annotations

_ADVANTAGES = "dr_grpo rloo reinforce_plus_plus reinforce_plus_plus_baseline remax gpg pass_at_k".split()

FIRST_PARTY: dict[str, dict[str, str]] = {
    "algorithms": {
        **{name: f"drivetrain-algo-{name}" for name in ("dapo", "dpo", "grpo", "opo", "ppo", "sft", "spin", "sppo")},
        "online_dpo": "drivetrain-algo-dpo",
    },
    "backends": {name: f"drivetrain-backend-{name}" for name in ("fsdp", "megatron")},
    "optimizers": {
        "adamw": "drivetrain-backend-fsdp",
        "muon": "drivetrain-backend-fsdp",
        "adamw_8bit": "drivetrain-optimizers",
    },
    "dispatch_modes": {
        f"megatron_{name}": "drivetrain-backend-megatron"
        for name in ("compute", "compute_proto", "pp_as_dp", "pp_as_dp_proto", "pp_only")
    },
    "rollouts": {name: f"drivetrain-rollout-{name}" for name in ("hf", "vllm")},
    "hybrid_engines": {name: "drivetrain-hybrid-engine" for name in ("colocated", "disaggregated")},
    "weight_transports": {name: "drivetrain-hybrid-engine" for name in ("in_process", "gloo", "nccl", "ipc", "folder")},
    "advantage_estimators": {
        **{name: f"drivetrain-algo-{name}" for name in ("grpo", "opo")},
        **{name: "drivetrain-advantages" for name in _ADVANTAGES},
    },
    "policy_losses": {
        "dpo": "drivetrain-algo-dpo",
        "nll": "drivetrain-algo-sft",
        "sppo": "drivetrain-algo-sppo",
        **{n: "drivetrain-policy-losses" for n in "gspo gmpo cispo sapo gpg clip_cov kl_cov dro".split()},
    },
    "executors": {"ray": "drivetrain-executor-ray"},
    "hardware": {name: f"drivetrain-hardware-{name}" for name in ("ascend", "cuda", "rocm")},
    "datasets": {name: "drivetrain-tasks" for name in ("reasoning_gym", "parquet", "csv", "huggingface")},
    "rewards": {
        **{name: "drivetrain-judges" for name in ("llm_judge", "llm_preference")},
        **{name: "drivetrain-tasks" for name in ("reasoning_gym", "gsm8k", "math_verify", "code", "format", "length")},
    },
    "trackers": {
        **{name: "drivetrain-report" for name in ("console", "report")},
        **{name: "drivetrain-trackers" for name in ("csv", "parquet", "tensorboard", "wandb", "mlflow")},
    },
    "commands": {"report": "drivetrain-report", "submit": "drivetrain-executor-ray"},
}
