"""The compiled step on an accelerator."""

import optimizer_rig as rig
import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_step_is_that_of_the_cpu(dtype: torch.dtype) -> None:
    device = torch.accelerator.current_accelerator().type
    compiled, plain = rig.outcome(device=device, dtype=dtype), rig.outcome(dtype=dtype)
    for name in rig.SHAPES:
        apart = (compiled[name].cpu().float() - plain[name].float()).abs() > (2e-6 if dtype == torch.float32 else 2e-2)
        assert float(apart.float().mean()) < 2e-3, name
