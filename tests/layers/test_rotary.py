"""Rotary positions against complex numbers, and what they are for: scores that depend on distance alone."""

import pytest
import torch
from torch.testing import assert_close

import tpcourse as tp
from tpcourse.layers import apply_rotary

PLACES = torch.tensor([0, 1, 4, 2, 1000])


def by_complex_numbers(x, positions, base=10000.0):
    """x_i + i x_{i + d/2} times exp(i m base^(-2 i / d))."""
    half = x.size(-1) // 2
    z = torch.complex(x[..., :half], x[..., half:])
    rates = torch.tensor([base ** (-2 * i / x.size(-1)) for i in range(half)], dtype=torch.float64)
    z = z * torch.exp(1j * positions[:, None] * rates)
    return torch.cat([z.real, z.imag], -1)


@pytest.mark.parametrize("shape", [(2, 3, 5, 6), (5, 2), (1, 5, 10)], ids=str)
@pytest.mark.parametrize("base", [10000.0, 50.0])
def test_against_complex_numbers(shape, base):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(shape, dtype=torch.float64)
    own, right = (f(x, PLACES, base) for f in (apply_rotary, by_complex_numbers))
    assert_close(own, right)
    assert_close(*(torch.autograd.grad(y, x, grad) for y in (own, right)))


def test_scores_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 8, dtype=torch.float64)

    def score(m, n):
        turned = [apply_rotary(x, torch.tensor([place])) for x, place in ((q, m), (k, n))]
        return (turned[0] * turned[1]).sum()

    assert_close(score(7, 3), score(4, 0))
    assert_close(score(1007, 1003), score(4, 0))
    assert abs(score(7, 3) - score(3, 7)) > 1e-3 and abs(score(7, 3) - score(7, 2)) > 1e-3


def test_a_turn_keeps_lengths_and_the_first_token():
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    y = apply_rotary(x, PLACES)
    assert_close(y.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(y[:, 0], x[:, 0]) and not torch.isclose(y[:, 1:], x[:, 1:]).all(-1).any()


def test_angles_of_late_tokens_are_not_rounded_to_16_bits():
    """bfloat16 has 8 digits: position 1001 would be 1000, a whole radian off."""
    x = torch.randn(1, 6).bfloat16()
    right = by_complex_numbers(x.double(), torch.tensor([1001])).bfloat16()
    y = apply_rotary(x, torch.tensor([1001]))
    assert y.dtype == torch.bfloat16
    assert_close(y, right)
    assert not torch.allclose(y, by_complex_numbers(x.double(), torch.tensor([1000])).bfloat16(), atol=0.1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_keeps_a_cosine_and_a_sine_a_pair(device):
    with torch.device(device), tp.saved_activations() as mem:
        apply_rotary(torch.randn(2, 3, 5, 6, requires_grad=True), torch.arange(5))
    assert mem.bytes == 2 * 5 * 3 * 4


def test_errors_name_the_numbers_and_the_way_out():
    with pytest.raises(ValueError, match="head_dim=7 does not split into pairs; make it 8"):
        apply_rotary(torch.zeros(5, 7), PLACES)
    with pytest.raises(ValueError, match=r"positions have shape \(5,\) for 4 tokens; pass \(4,\)"):
        apply_rotary(torch.zeros(4, 6), PLACES)
