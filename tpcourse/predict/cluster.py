"""Machines as numbers: what a GPU computes, what links carry, by their data sheets."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """Dense matrix products in 16 bits (flop/s), memory (bytes), and what that moves (bytes/s)."""

    matmul: float
    memory: float
    bandwidth: float


@dataclass(frozen=True)
class Link:
    """What one GPU, or one card, sends in one direction (bytes/s); `alpha`, the seconds of a ring's step."""

    bandwidth: float
    alpha: float


@dataclass(frozen=True)
class Cluster:
    """Nodes of `node` GPUs, each with a link of its own; `cards` network cards in a node, for all of them."""

    gpu: GPU
    inside: Link
    between: Link
    node: int = 8
    cards: int = 8


# Sources: NVIDIA's data sheets "V100 Tensor Core GPU" (2020), "A100 Tensor Core GPU" (2021), "H100 Tensor
# Core GPU" (2023), "H200 Tensor Core GPU" (2024), each the SXM column. The last two print rates with
# sparsity, which are twice the dense ones.
V100 = GPU(125e12, 32e9, 900e9)
A100 = GPU(312e12, 80e9, 2039e9)
H100 = GPU(989.5e12, 80e9, 3350e9)
H200 = GPU(989.5e12, 141e9, 4800e9)

# The same sheets; they print both directions together. The seconds of a step, here and below, are of the
# right size and no more: `fit_alpha_beta` measures them.
NVLINK2 = Link(150e9, 5e-6)
NVLINK3 = Link(300e9, 5e-6)
NVLINK4 = Link(450e9, 5e-6)
PCIE4 = Link(32e9, 5e-6)
PCIE5 = Link(64e9, 5e-6)

# InfiniBand Trade Association's roadmap, 4x ports: 100, 200 and 400 Gb/s.
EDR = Link(12.5e9, 10e-6)
HDR = Link(25e9, 10e-6)
NDR = Link(50e9, 10e-6)

# NVIDIA's data sheets "DGX A100" and "DGX H100 / H200": eight GPUs, eight cards for computing.
DGX_A100 = Cluster(A100, NVLINK3, HDR)
DGX_H100 = Cluster(H100, NVLINK4, NDR)
DGX_H200 = Cluster(H200, NVLINK4, NDR)
