"""Machines as numbers: what a GPU computes, what links carry, by their data sheets."""

from dataclasses import dataclass

from tpcourse.measure import Row
from tpcourse.predict.work import OPTIMIZER

# Shares of the data sheets' rates that large kernels reach: of matrix products, memory and links. Of a coarse
# grid those that fit the ten rows of Narayanan et al. 2021, Table 1, best: see tests/predict/test_time.py.
MATMUL, BANDWIDTH, LINK = 0.7, 0.7, 0.8
LAUNCH = 5e-6  # seconds between the starts of two kernels, of the right size and no more: none is faster


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
    """`nodes` of `node` GPUs, each with a link of its own; `cards` network cards in a node, for all of them.

    `overlap`: of a message and a product under way together, the share of the shorter one's seconds that is
    saved. 1 is the most there can be, and 0 a program that waits for its messages; `calibrate` measures it.
    """

    gpu: GPU
    inside: Link
    between: Link
    node: int = 8
    cards: int = 8
    nodes: int = 1
    overlap: float = 1.0

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.nodes * self.node

    @property
    def memory(self) -> float:
        """Bytes of a GPU."""
        return self.gpu.memory

    def product(self, n: int, k: int, m: int, e: int, batch: int = 1) -> float:
        """Seconds of [n, k] @ [k, m], `batch` times: at a share of the best rate, if memory is not slower.

        This is the roofline (Williams et al. 2009, "Roofline: an insightful visual performance model for
        multicore architectures"): a product of small matrices waits for its bytes, or for its start.
        Rates are of 16 bits; numbers of 4 bytes take twice as long, of 8 bytes four times.
        """
        flop = batch * 2 * n * k * m * max(e, 2) / 2
        return max(flop / (MATMUL * self.gpu.matmul),
                   self.kernel("product", batch * e * (n * k + k * m + n * m)))

    def kernel(self, kind: str, nbytes: float) -> float:
        """Seconds to read and write so many bytes, whatever is computed meanwhile."""
        seconds = nbytes / (BANDWIDTH * self.gpu.bandwidth)
        return LAUNCH + seconds if kind == OPTIMIZER else max(LAUNCH, seconds)

    def message(self, row: Row, here: int) -> float:
        """alpha for each of a ring's steps, and a rank's bytes over what its link carries.

        Between nodes a ring with `here` ranks in a node shares the node's cards with the rings of its other
        GPUs: it gets here / node of them. A broadcast's or reduce's bytes pass every link in a pipeline.
        """
        link, bandwidth = self.inside, self.inside.bandwidth
        if here < row.group_size:
            link = self.between
            bandwidth = min(bandwidth, link.bandwidth * self.cards * here / self.node)
        moved = row.message_bytes if row.op in ("broadcast", "reduce") else row.wire_bytes
        steps = (2 if row.op == "all_reduce" else 1) * (row.group_size - 1)
        return row.calls * steps * link.alpha + moved / (LINK * bandwidth)


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

# IEEE 802.3: 10 Gb/s (802.3ae), 25 Gb/s (802.3by), 100 Gb/s (802.3bj). Where TCP carries the messages a step
# passes both kernels and takes longer.
ETHERNET_10 = Link(1.25e9, 30e-6)
ETHERNET_25 = Link(3.125e9, 30e-6)
ETHERNET_100 = Link(12.5e9, 30e-6)

# NVIDIA's data sheets "DGX-1" (2017): eight GPUs, four cards; "DGX A100" and "DGX H100 / H200": eight, and eight
# cards for computing. One node each: replace(DGX_A100, nodes=128) has 1,024 GPUs.
DGX_1 = Cluster(V100, NVLINK2, EDR, cards=4)
DGX_A100 = Cluster(A100, NVLINK3, HDR)
DGX_H100 = Cluster(H100, NVLINK4, NDR)
DGX_H200 = Cluster(H200, NVLINK4, NDR)
