"""How fast a GPU could do a piece of work at best: bytes over bandwidth, or products over matrix throughput.

Figures of a GPU are its data sheet's: dense, without sparsity. What kernels reach lies lower (on an H200 some 4.3 of
the 4.8 TB/s and 790 of the 990 TFLOP/s), so a share of 0.9 of the memory floor is as good as it gets.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """tb_s: memory bandwidth, 10^12 bytes a second.  bf16, fp8: dense matrix throughput, 10^12 operations a second."""

    tb_s: float
    bf16: float
    fp8: float


# Part of the device's name -> figures; the first that fits. A GPU without fp8 matrices computes them in bf16.
GPUS: dict[str, Gpu] = {
    "H200": Gpu(4.8, 990, 1979),
    "H100 80GB HBM3": Gpu(3.35, 990, 1979),
    "H100 PCIe": Gpu(2.0, 756, 1513),
    "H20": Gpu(4.0, 148, 296),
    "B200": Gpu(8.0, 2250, 4500),
    "A100-SXM4-80GB": Gpu(2.04, 312, 312),
    "A100": Gpu(1.55, 312, 312),
    "L40S": Gpu(0.864, 362, 733),
    "RTX 4090": Gpu(1.01, 165, 330),
    "RTX 5090": Gpu(1.79, 210, 419),
}


def gpu_of(device_name: str) -> Gpu | None:
    """Figures of the GPU with this name, as torch.cuda.get_device_name gives it; None when it is not in the table."""
    # "H200" before "H20": the table is in order, and the longer name comes first.
    return next((gpu for part, gpu in GPUS.items() if part in device_name), None)


@dataclass(frozen=True)
class Work:
    """What no implementation of a case can avoid.

    bytes: read and written once.  flops: matrix operations, two for a product and its sum.  fp8: the products are of
    fp8 values.
    """

    bytes: float
    flops: float = 0.0
    fp8: bool = False

    def __add__(self, other: Work) -> Work:
        """Both, one after the other; their products must be of one kind, or one of them must have none."""
        if self.flops and other.flops and self.fp8 != other.fp8:
            raise ValueError("work in bf16 and in fp8 has two floors, not one: add their times instead")
        fp8 = self.fp8 if self.flops else other.fp8
        return Work(self.bytes + other.bytes, self.flops + other.flops, fp8)


def floor(work: Work, gpu: Gpu | None) -> tuple[float, str] | None:
    """(microseconds, "memory" or "matrix"), or None for a GPU that is not in the table."""
    if gpu is None:
        return None
    memory = work.bytes / gpu.tb_s / 1e6
    matrix = work.flops / (gpu.fp8 if work.fp8 else gpu.bf16) / 1e6
    return max((memory, "memory"), (matrix, "matrix"))


def sparse_mla(rows: int, heads: int, picks: int, row_bytes: int, touched: int) -> Work:
    """touched: different cache rows that the call reads."""
    moved = touched * row_bytes + rows * (heads * (576 + 512) * 2 + picks * 4)
    return Work(moved, 2.0 * rows * picks * heads * (576 + 512))


def index_scores(rows: int, heads: int, pairs: int, keys: int, written: bool = True) -> Work:
    """pairs: (row, key) pairs that are scored.  keys: different keys.  written: the scores leave the chip as f32."""
    moved = keys * 132 + rows * heads * (128 + 4) + (4 * pairs if written else 0)
    return Work(moved, 2.0 * pairs * heads * 128, fp8=True)


def selection(rows: int, scores: int, picks: int) -> Work:
    """scores: of all rows together, f32."""
    return Work(4 * scores + 4 * rows * picks)


def dense_mha(tokens: int, heads: int, key: int, value: int) -> Work:
    """Causal attention of `tokens` queries over themselves, bf16."""
    pairs = tokens * (tokens + 1) / 2
    return Work(2 * tokens * heads * 2 * (key + value), 2.0 * pairs * heads * (key + value))
