"""ZeRO stage 0 without DeepSpeed, on one rank; more ranks are those of `test_engine.py`."""

import torch
from torch import nn

from vit_ray.training import replicated
from vit_ray.training.optimizers import StepGuard
from vit_ray.training.replicated import ReplicatedOptimizer


def test_a_weight_that_no_pass_reaches_decays_as_it_does_on_many_ranks(monkeypatch):
    monkeypatch.setattr(replicated.dist, "get_world_size", lambda: 1)
    reached, unreached = (nn.Parameter(torch.ones(3)) for _ in range(2))
    adamw = torch.optim.AdamW([reached, unreached], lr=0.1, weight_decay=0.5, fused=True)
    optimizer = ReplicatedOptimizer(
        [reached, unreached],
        adamw,
        StepGuard(adamw, torch.device("cpu")),
        clip_norm=0.0,
        bucket_elements=10,
        is_last_pass=lambda: True,
    )
    (2 * reached).sum().backward()
    optimizer.step()
    torch.testing.assert_close(unreached.detach(), torch.full((3,), 1 - 0.1 * 0.5))
    assert adamw.state[unreached]["step"] == adamw.state[reached]["step"] == 1
