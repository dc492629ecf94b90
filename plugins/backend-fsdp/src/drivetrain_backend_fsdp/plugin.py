"""What this distribution offers. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import BackendSpec, ConfigAliasSpec, OptimizerSpec, hookimpl


@hookimpl
def drivetrain_backends() -> Iterable[BackendSpec]:
    """The backend ``fsdp``."""
    yield BackendSpec(
        name="fsdp",
        summary="Trains transformers models on packed sequences, sharded over ranks with PyTorch FSDP2.",
        factory="drivetrain_backend_fsdp.backend:FSDPBackend",
        config="drivetrain_backend_fsdp.config:FSDPConfig",
        provides=(
            "backend.train",
            "backend.log_probs",
            "backend.values",
            "backend.scores",
            "backend.live_module",
            "backend.weights",
            "backend.weight_shards",
            "backend.export",
            "backend.snapshot",
            "backend.param_offload",
            "backend.grad_offload",
            "backend.optimizer_offload",
        ),
    )


@hookimpl
def drivetrain_optimizers() -> Iterable[OptimizerSpec]:
    """The optimizers ``adamw`` and ``muon``."""
    yield OptimizerSpec(
        name="adamw",
        summary="Adam with decoupled weight decay on matrices; norms and biases are not decayed.",
        factory="drivetrain_backend_fsdp.optimizer:adamw",
        config="drivetrain_backend_fsdp.config:AdamWConfig",
    )
    yield OptimizerSpec(
        name="muon",
        summary="Orthogonalised momentum for hidden matrices, AdamW for embeddings, output layers, norms and biases.",
        factory="drivetrain_backend_fsdp.muon:muon",
        config="drivetrain_backend_fsdp.config:MuonConfig",
    )


@hookimpl
def drivetrain_config_aliases() -> Iterable[ConfigAliasSpec]:
    """verl's sections of FSDP's options; keys but one have the same names here."""
    theirs = {"actor": "actor_rollout_ref.actor", "ref": "actor_rollout_ref.ref", "critic": "critic.model"}
    yield ConfigAliasSpec(
        name="verl_fsdp",
        summary="verl's sections of FSDP's options, such as param_offload and reshard_after_forward.",
        aliases={f"{section}.fsdp_config.*": f"{role}.backend.*" for role, section in theirs.items()}
        | {f"{section}.fsdp_config.offload_policy": f"{role}.backend.cpu_offload" for role, section in theirs.items()},
    )
