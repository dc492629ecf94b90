"""megatron-core's process groups, and where a rank stands among them."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch.distributed.distributed_c10d import _world

from drivetrain import RankLayout, RunError
from drivetrain_backend_megatron.config import MegatronConfig

_users = 0  # models of this process
_own_world = False  # whether this module initialised torch.distributed
_groups: list[dist.ProcessGroup] = []  # that megatron-core made, and does not destroy


def initialize(config: MegatronConfig, *, communication_backend: str, seed: int) -> None:
    """Make the process groups of a config; a second model of this process shares them.

    megatron-core keeps one set of groups a process, so all models of a process are parallel in the same way.

    Args:
        communication_backend: of a group of one, made where ``torch.distributed`` is not initialised.
        seed: from which each rank derives the seeds of its random numbers.

    Raises:
        drivetrain.RunError: the processes do not divide, or another model of this process is parallel in another way.
    """
    global _users, _own_world
    if not dist.is_initialized():
        _own_world = True
        dist.init_process_group(communication_backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    if problem := config.sizes_problem(dist.get_world_size()):
        raise RunError(problem, where="backend megatron", mend="let the sizes multiply to a divisor of the processes")
    if not parallel_state.model_parallel_is_initialized():
        before = set(_world.pg_map)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            pipeline_model_parallel_size=config.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
            context_parallel_size=config.context_parallel_size,
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=config.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
        _groups.extend(group for group in _world.pg_map if group not in before)
        model_parallel_cuda_manual_seed(seed)
    wanted = (config.tensor_model_parallel_size, config.pipeline_model_parallel_size,
              config.virtual_pipeline_model_parallel_size, config.context_parallel_size,
              config.expert_model_parallel_size, config.expert_tensor_size)  # fmt: skip
    found = (parallel_state.get_tensor_model_parallel_world_size(),
             parallel_state.get_pipeline_model_parallel_world_size(),
             parallel_state.get_virtual_pipeline_model_parallel_world_size(),
             parallel_state.get_context_parallel_world_size(),
             parallel_state.get_expert_model_parallel_world_size(),
             parallel_state.get_expert_tensor_parallel_world_size())  # fmt: skip
    if found != wanted:
        raise RunError(
            "this process has other sizes (tensor, pipeline, virtual pipeline, context, expert, expert tensor):"
            f" {found}, for another model or by init_megatron; this one asks for {wanted}",
            where="backend megatron", mend="give models of one pool the same sizes, or pools of their own",
        )  # fmt: skip
    _users += 1


def release() -> None:
    """Give up the process groups, once for each :func:`initialize`; the last model takes them along."""
    global _users, _own_world
    _users -= 1
    if _users:
        return
    parallel_state.destroy_model_parallel()
    while _groups:  # each has threads and connections
        dist.destroy_process_group(_groups.pop())
    if _own_world:
        dist.destroy_process_group()
        _own_world = False


def layout() -> RankLayout:
    """Where this rank stands in the mesh ``train``."""
    return RankLayout(
        dp=parallel_state.get_data_parallel_rank(),
        tp=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        cp=parallel_state.get_context_parallel_rank(),
        ep=parallel_state.get_expert_model_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
    )
