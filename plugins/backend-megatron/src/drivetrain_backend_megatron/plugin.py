"""What this distribution offers; torch is not imported here."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import BackendSpec, ConfigAliasSpec, DispatchModeSpec, ModelFamilySpec, hookimpl


@hookimpl
def drivetrain_backends() -> Iterable[BackendSpec]:
    """The backend ``megatron``."""
    yield BackendSpec(
        name="megatron",
        summary="Trains megatron-core models on packed sequences, with tensor, pipeline, context, expert and data"
        " parallelism.",
        factory="drivetrain_backend_megatron.backend:MegatronBackend",
        config="drivetrain_backend_megatron.config:MegatronConfig",
        provides=(
            "backend.train",
            "backend.log_probs",
            "backend.values",
            "backend.scores",
            "backend.weights",
            "backend.export",
            "backend.snapshot",
            "backend.param_offload",
            "backend.grad_offload",
            "backend.optimizer_offload",
        ),
    )


@hookimpl
def drivetrain_model_families() -> Iterable[ModelFamilySpec]:
    """The families whose models backend ``megatron`` builds."""
    for name, title in (("llama", "Llama"), ("qwen2", "Qwen2 and 2.5"), ("qwen3", "Qwen3"), ("mixtral", "Mixtral")):
        yield ModelFamilySpec(
            name=f"megatron_{name}",
            summary=f"Layers and names of {title} for backend megatron.",
            factory=f"drivetrain_backend_megatron.families:{name.upper()}",
            model_types=(name,),
            backend="megatron",
        )


@hookimpl
def drivetrain_dispatch_modes() -> Iterable[DispatchModeSpec]:
    for name, mode, summary in (
        ("megatron_compute", "Compute", "Lists by dp index, from the last pipeline stage."),
        ("megatron_compute_proto", "ComputeProto", "Batches in parts by dp index, from the last pipeline stage."),
        ("megatron_pp_as_dp", "PPAsDP", "Lists by dp index and pipeline stage."),
        ("megatron_pp_as_dp_proto", "PPAsDPProto", "Batches in parts by dp index and pipeline stage."),
        ("megatron_pp_only", "PPOnly", "The same arguments to every rank; a result of each pipeline stage."),
    ):
        yield DispatchModeSpec(name=name, summary=summary, factory=f"drivetrain_backend_megatron.dispatch:{mode}")


@hookimpl
def drivetrain_config_aliases() -> Iterable[ConfigAliasSpec]:
    """verl's sections whose keys a backend of Megatron has by the same names."""
    theirs = {"actor": "actor_rollout_ref.actor", "ref": "actor_rollout_ref.ref", "critic": "critic"}
    yield ConfigAliasSpec(
        name="verl_megatron",
        summary="verl's sections of Megatron's options, such as tensor_model_parallel_size.",
        aliases={f"{section}.megatron.*": f"{role}.backend.*" for role, section in theirs.items()},
    )
