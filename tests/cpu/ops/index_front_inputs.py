"""Inputs of index_keys and index_queries, and how far stored values may lie from fp64."""

import functools
from dataclasses import dataclass

import torch

from sglang_dsa_plugin.cache.layouts import FP8, index_page_shape
from sglang_dsa_plugin.ops import index_keys, index_queries, key_pages, quant

POSITIONS = 70000
EPS = 1e-6


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@functools.cache
def rope_table(positions=POSITIONS, theta=1e4):
    angle = torch.arange(positions).double()[:, None] * theta ** (-torch.arange(0, 64, 2).double() / 64)
    return torch.cat([angle.cos(), angle.sin()], dim=-1).float()


def positions_of(rows, seed=1):
    """Random, the first ones at the ends of the table and around 2^15."""
    some = torch.tensor([0, 2**15 - 1, 2**15, POSITIONS - 1])[:rows]
    return torch.cat((some, torch.randint(0, POSITIONS, (rows - len(some),), generator=generator(seed))))


def slots_of(rows, pages, seed=2):
    """Different slots; every fifth is -1."""
    slots = torch.randperm(64 * pages, generator=generator(seed))[:rows]
    slots[4::5] = -1
    return slots


def new_pages(count, dtype, device="cpu"):
    """Pages of keys of `dtype`, filled so that a stray write shows."""
    shape, stored = index_page_shape(dtype)
    return torch.full((count, *shape), 7, dtype=stored, device=device)


@dataclass
class KeyInputs:
    """What index_keys.store takes besides pages and slots, in its order."""

    projected: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    positions: torch.Tensor
    cos_sin: torch.Tensor
    layout: str

    def args(self, device="cpu"):
        return [a.to(device) if isinstance(a, torch.Tensor) else a for a in vars(self).values()]


def key_inputs(rows, layout, norm="layer", dtype=torch.float32, seed=0, size=1.0):
    """Rows around a mean that is not 0, which tells the norms apart."""
    g = generator(seed)
    projected = ((torch.randn(rows, 128, generator=g) + 2) * size).to(dtype)
    weight, bias = 1 + 0.3 * torch.randn(128, generator=g), 0.3 * torch.randn(128, generator=g)
    bias = bias if norm == "layer" else None
    return KeyInputs(projected, weight, bias, EPS, positions_of(rows), rope_table(), layout)


def query_inputs(rows, heads, layout, dtype=torch.float32, seed=0, size=1.0):
    """What index_queries.prepare takes, without the dtype."""
    g = generator(seed)
    projected = (torch.randn(rows, heads * 128, generator=g) * size).to(dtype)
    return [projected, torch.randn(rows, heads, generator=g), positions_of(rows), rope_table(), layout]


def exact_queries(rows, heads, seed=0):
    """Integers so small that every sum of the rotation is exact, at position 0, where rope changes nothing."""
    g = generator(seed)
    projected = torch.randint(-9, 10, (rows, heads * 128), generator=g).float()
    weights = torch.randn(rows, heads, generator=g)
    return [projected, weights, torch.zeros(rows, dtype=torch.int64), rope_table(4), "half"]


def exact_keys(rows, seed=0):
    """Rows of +a and -a in equal number, a power of two: without eps exactly +1 and -1 after the norm."""
    g = generator(seed)
    signs = torch.stack([torch.randperm(128, generator=g) for _ in range(rows)]) % 2 * 2.0 - 1
    sizes = 2.0 ** torch.randint(-3, 4, (rows, 1), generator=g)
    weight = torch.randint(1, 5, (128,), generator=g).float()
    bias = torch.randint(-3, 4, (128,), generator=g).float()
    return KeyInputs(signs * sizes, weight, bias, 0.0, torch.zeros(rows, dtype=torch.int64), rope_table(4), "half")


def e4m3_borders():
    """f32 [3, 512]: every e4m3 value, the middles between neighbours, the f32 numbers next to those, and what saturates
    or is no number; all with both signs.
    """
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    middles = (codes[1:] + codes[:-1]) / 2
    odd = torch.tensor([448.1, 464, 465, 1e30, torch.inf, torch.nan, 2**-11, 1e-30])
    values = torch.cat((odd, codes, middles, middles.nextafter(codes[1:]), middles.nextafter(codes[:-1])))
    return torch.cat((values, -values, torch.zeros(3 * 512 - 2 * len(values)))).view(3, 512)


def assert_stored(got, scale, want):
    """got [..., 128] as stored (e4m3 with `scale` [...], or a float dtype) against fp64 `want`.

    Floats: f32 rounding of the row's largest value, then one rounding to their dtype. e4m3: the scale is that of fp64;
    values are those of fp64 but for at most a thousandth, at the border between two, and those are one step off.
    """
    tolerance = 2e-6 * want.abs().amax(-1, keepdim=True)
    if got.dtype != FP8:
        last = 0 if got.dtype == torch.float32 else torch.finfo(got.dtype).eps / 2
        assert ((got.double() - want).abs() <= tolerance * (1 + last) + last * want.abs()).all()
        return
    expected, expected_scale = quant.reference_quantize_keys(want.reshape(-1, 128))
    assert torch.equal(scale.reshape(-1).double(), expected_scale.double())
    ours, theirs = (steps(x.reshape(-1, 128)) for x in (got, expected))
    off = (ours - theirs).abs()
    assert off.max() <= 1
    assert (off > 0).double().mean() <= 1e-3


def steps(x):
    """e4m3 -> place in the order of its values; -0 and 0 share one."""
    code = x.view(torch.uint8).int()
    return torch.where(code < 128, code, 128 - code)


def assert_keys(pages, slots, inputs):
    """Pages after a store: right keys at `slots`, everything else as `new_pages` left it. All on a CPU."""
    dtype = FP8 if pages.dtype == torch.uint8 else pages.dtype
    kept = slots >= 0
    got, scale = key_pages.load(pages, slots[kept])
    want = index_keys.reference_keys(*inputs.args(), dtype == FP8)[kept]
    assert_stored(got, scale, want)
    untouched = new_pages(len(pages), dtype)
    key_pages.reference_store(untouched, slots[kept], got, scale)
    assert torch.equal(pages.view(torch.uint8), untouched.view(torch.uint8))


def assert_queries(q, gate, inputs):
    """q and gate on a CPU against fp64; the gate holds the scale of e4m3 queries."""
    want = index_queries.reference_queries(*(inputs[i] for i in (0, 2, 3, 4)), q.dtype == FP8)
    plain = inputs[1].double() * (q.shape[1] * 128) ** -0.5
    assert gate.dtype == torch.float32 and q.shape == want.shape
    _, reference_gate = index_queries.reference(*inputs, q.dtype)
    assert torch.allclose(gate.double(), reference_gate, rtol=3e-7, atol=0)
    scale = None
    if q.dtype == FP8:
        scale = torch.exp2((reference_gate / plain).log2().round())
    assert_stored(q, scale, want)
