"""Another abduction network in the place of the linear one."""

import pytest
import torch
from support.tiny import tiny_base, tiny_model

from cqwen_dist.model import CausalQwenModel


def test_two_layers_start_as_the_linear_one_and_learn_a_curve():
    """U's location follows |z|, which no linear map does."""
    linear, curved = tiny_model(), tiny_model(abduction="two_layer")
    z = torch.randn(64, 24, generator=torch.Generator().manual_seed(0))
    for a, b in zip(linear.abduction(z), curved.abduction(z), strict=True):
        assert torch.equal(a, b)

    def error_after_training(network):
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
        for _ in range(150):
            optimizer.zero_grad()
            loss = (network(z).loc - z.abs()).square().mean()
            loss.backward()
            optimizer.step()
        return float(loss.detach())

    assert error_after_training(curved.abduction) < 0.3 * error_after_training(linear.abduction)


def test_the_initial_gain_of_a_head_without_a_base():
    """S1 5: Xavier with gain 0.1, and a bias of 0.01 where the layer is no head."""
    up = tiny_model(abduction="two_layer").abduction.up
    torch.testing.assert_close(up.weight.var(), torch.tensor(0.02 / (24 + 24)), rtol=0.15, atol=0)  # of 576 draws
    assert up.bias.unique().tolist() == [pytest.approx(0.01)]
    torch.manual_seed(3)
    whole = CausalQwenModel.from_base_model(tiny_base(), start="seed", num_token_id=90)
    torch.manual_seed(3)
    tenth = CausalQwenModel.from_base_model(tiny_base(), start="seed", num_token_id=90, reg_gain=0.1)
    torch.testing.assert_close(tenth.action.reg_weight, whole.action.reg_weight * 0.1)
    assert not tenth.action.reg_bias.any()
