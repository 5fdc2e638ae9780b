"""Index queries, keys and pages for the tests of index_scores and index_select."""

from dataclasses import dataclass

import torch

from sglang_dsa_plugin.cache.layouts import FP8, INDEX_PAGE_BYTES

DTYPES = (torch.float32, torch.bfloat16, torch.float16, FP8)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@dataclass
class Inputs:
    """q [R, H, 128], k [S, 128] (S a multiple of 64), k_scale [S] or None, gate [R, H]."""

    q: torch.Tensor
    k: torch.Tensor
    k_scale: torch.Tensor | None
    gate: torch.Tensor

    @property
    def pages(self):
        """The keys as index pages; page i holds keys 64 i .. 64 i + 63."""
        if self.k_scale is None:
            return self.k.view(-1, 64, 128)
        pages = torch.empty(len(self.k) // 64, INDEX_PAGE_BYTES, dtype=torch.uint8)
        pages[:, : 64 * 128] = self.k.view(torch.uint8).view(-1, 64 * 128)
        pages[:, 64 * 128 :] = self.k_scale.contiguous().view(torch.uint8).view(-1, 64 * 4)
        return pages

    def term_size(self, keys=slice(None), rows=slice(None)):
        """Sum over heads of |gate * (|q| . |k|)| * k_scale in fp64, [R, S]: what rounding errors are relative to."""
        dots = torch.einsum("rhd,sd->rhs", self.q[rows].double().abs(), self.k[keys].double().abs())
        total = (self.gate[rows].double().abs().unsqueeze(-1) * dots).sum(1)
        return total if self.k_scale is None else total * self.k_scale[keys].double()


def normal(rows, heads, keys, dtype=torch.float32, seed=0):
    """Gaussian inputs; gates of both signs, scales that are no powers of two."""
    g = generator(seed)
    q, k = (torch.randn(*shape, generator=g).to(dtype) for shape in ((rows, heads, 128), (keys, 128)))
    gate = torch.randn(rows, heads, generator=g)
    return Inputs(q, k, torch.rand(keys, generator=g) + 0.1 if dtype == FP8 else None, gate)


def exact(rows, heads, keys, dtype=torch.float32, seed=0):
    """Small integers, so that every score is exact in f32 and picks can be compared with fp64 bit for bit."""
    g = generator(seed)
    q, k = (torch.randint(-2, 3, shape, generator=g).float().to(dtype) for shape in ((rows, heads, 128), (keys, 128)))
    gate = torch.randint(-3, 8, (rows, heads), generator=g).float()
    return Inputs(q, k, 2.0 ** torch.randint(-2, 3, (keys,), generator=g) if dtype == FP8 else None, gate)
