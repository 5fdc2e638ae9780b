"""ops.quant: bit for bit against its fp64 reference, and what the bytes and the corner cases are."""

import math
import struct

import pytest
import torch

from sglang_dsa_plugin.cache.layouts import FP8, LATENT_LAYOUTS
from sglang_dsa_plugin.kernels.torch_impl.quant import power_of_two_scale
from sglang_dsa_plugin.ops import quant

LAYOUTS = tuple(LATENT_LAYOUTS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _spread(rows, width, seed=0):
    """Rows of very different size, zeros and subnormals among them."""
    x = _normal(rows, width, seed=seed) * torch.logspace(-9, 4, max(rows, 1))[:rows, None]
    if rows > 3:
        x[1] = 0
        x[2] = 1e-41
        x[3, ::2] = 0
    return x


def _bits(x):
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_equal_the_reference(rows, dtype):
    k = _spread(rows, 128).to(dtype)
    fp8, scale = quant.quantize_keys(k)
    want_fp8, want_scale = quant.reference_quantize_keys(k)
    assert fp8.dtype == FP8 and scale.dtype == torch.float32 and scale.shape == (rows,)
    assert torch.equal(_bits(fp8), _bits(want_fp8)) and torch.equal(scale, want_scale)


def test_key_scale_changes_exactly_at_448():
    edges = 448 * 2.0 ** torch.arange(-21, 100, dtype=torch.float32)
    below, above = (torch.nextafter(edges, torch.full_like(edges, to)) for to in (0, math.inf))
    k = torch.zeros(3 * len(edges), 128)
    k[:, 5] = torch.cat((below, edges, above))
    _, scale = quant.quantize_keys(k)
    at = 2.0 ** torch.arange(-21, 100, dtype=torch.float32)
    assert torch.equal(scale, torch.cat((at, at, 2 * at)))
    assert torch.equal(scale, quant.reference_quantize_keys(k)[1])


def test_key_ties_go_to_even_and_the_largest_value_never_saturates():
    k = torch.zeros(2, 128)
    k[0, :6] = torch.tensor([448.0, 17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10])
    k[1, 0] = 449
    fp8, scale = quant.quantize_keys(k)
    assert scale.tolist() == [1, 2]
    assert fp8[0, :6].float().tolist() == [448, 16, 20, -16, 0, 2 * 2.0**-9]
    assert fp8[1, 0].float() * scale[1] == 448


@pytest.mark.parametrize("nan_bits", [0x7FC00000, 0x7FFFFFFF, 0x7F800001])
def test_keys_that_are_not_numbers_stay_in_their_row(nan_bits):
    k = _normal(4, 128)
    want = quant.quantize_keys(k)
    k[1, 3] = torch.tensor(nan_bits, dtype=torch.int32).view(torch.float32)
    k[2, 4], k[2, 5] = math.inf, -math.inf
    fp8, scale = quant.quantize_keys(k)
    assert torch.equal(_bits(fp8[::3]), _bits(want[0][::3])) and torch.equal(scale[::3], want[1][::3])
    assert scale[1] == scale[2] == 2.0**120
    read = fp8.float() * scale[:, None]
    assert read[1].isnan().tolist() == [i == 3 for i in range(128)]
    assert read[2, 4] == math.inf and read[2, 5] == -math.inf and not read[2].isnan().any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [0, 1, 23])
@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_equal_the_reference_both_ways(layout, rows, dtype):
    latent, rope = _spread(rows, 512).to(dtype), _spread(rows, 64, seed=1).to(dtype)
    got = quant.quantize_latent(latent, rope, layout, kv_scale=0.37)
    want = quant.reference_quantize_latent(latent, rope, layout, kv_scale=0.37)
    spec = LATENT_LAYOUTS[layout]
    assert got.dtype == spec.dtype and got.shape == (rows, spec.width)
    assert torch.equal(_bits(got), _bits(want))
    read = quant.dequantize_latent(got, layout, kv_scale=0.37)
    want_read = quant.reference_dequantize_latent(got, layout, kv_scale=0.37)
    assert read.dtype == torch.float32
    torch.testing.assert_close(read.double(), want_read, rtol=2e-7, atol=0)


def test_row_of_656_bytes_is_as_described():
    latent = _normal(1, 512) * torch.tensor([1.0, 100, 0.01, 1000]).repeat_interleave(128)
    rope = _normal(1, 64, seed=1)
    row = bytes(quant.quantize_latent(latent, rope, "fp8_656")[0].tolist())
    assert len(row) == 656
    scales = struct.unpack("<4f", row[512:528])
    assert all(math.frexp(s)[0] == 0.5 for s in scales)
    nope = torch.tensor(list(row[:512]), dtype=torch.uint8).view(FP8).float()
    torch.testing.assert_close(nope * torch.tensor(scales).repeat_interleave(128), latent[0], rtol=2**-4, atol=1e-3)
    top_halves = [b"\0\0" + row[at : at + 2] for at in range(528, 656, 2)]
    assert [struct.unpack("<f", b)[0] for b in top_halves] == rope[0].bfloat16().float().tolist()


def test_scales_that_are_no_powers_of_two_are_read_as_they_are():
    rows = quant.quantize_latent(_normal(3, 512), _normal(3, 64), "fp8_656")
    scales = torch.tensor([0.3, 1.7, 0.011, 1.0])
    rows[:, 512:528] = scales.view(torch.uint8)
    want = rows[:, :512].contiguous().view(FP8).float() * scales.repeat_interleave(128)
    assert torch.equal(quant.dequantize_latent(rows, "fp8_656")[:, :512], want)


def test_every_e4m3_code_is_read_exactly():
    codes = torch.arange(576).remainder(256).to(torch.uint8).view(1, 576)
    read = quant.dequantize_latent(codes.view(FP8), "fp8_576")
    # By the format: sign, 4 bits of exponent with bias 7, 3 bits of mantissa; S.1111.111 is NaN.
    for code, value in zip(codes[0].tolist(), read[0].tolist()):
        exponent, mantissa = (code >> 3) & 15, code & 7
        if code & 0x7F == 0x7F:
            assert math.isnan(value)
            continue
        size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        assert value == (-size if code & 0x80 else size)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_each_nan_code_is_seen_alone(code):
    codes = torch.zeros(3, 576, dtype=torch.uint8)
    codes[1, 500] = code
    read = quant.dequantize_latent(codes.view(FP8), "fp8_576")
    assert read.isnan().nonzero().tolist() == [[1, 500]] and read.nan_to_num(0).abs().sum() == 0


def test_the_scale_of_any_nan_is_the_largest():
    nans = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, 0x7F800000], dtype=torch.int32).view(torch.float32)
    assert (power_of_two_scale(nans) == 2.0**120).all()


def test_rounding_reference_agrees_with_the_values_of_the_format():
    values = torch.arange(127, dtype=torch.uint8).view(FP8).double()
    assert torch.equal(quant.reference_e4m3(values), values)
    middle = (values[1:] + values[:-1]) / 2
    for nudge, expect in ((-1e-9, values[:-1]), (1e-9, values[1:])):
        assert torch.equal(quant.reference_e4m3(middle * (1 + nudge)), expect)
    even = (torch.arange(126) + 1) // 2 * 2
    assert torch.equal(quant.reference_e4m3(middle), values[even])


def test_one_scale_for_the_cache_saturates_at_448():
    latent, rope = torch.full((2, 512), 1000.0), torch.full((2, 64), -math.inf)
    latent[1, 7] = math.nan
    read = quant.dequantize_latent(quant.quantize_latent(latent, rope, "fp8_576", 0.5), "fp8_576", 0.5)
    assert (read[0, :512] == 224).all() and (read[:, 512:] == -224).all()
    assert read[1].isnan().tolist() == [i == 7 for i in range(576)]


def test_rows_of_a_larger_pool_are_read_in_place():
    pool = torch.zeros(9, 2, 656, dtype=torch.uint8)
    latent, rope = _normal(9, 512), _normal(9, 64)
    pool[:, 1] = quant.quantize_latent(latent, rope, "fp8_656")
    want = quant.dequantize_latent(pool[:, 1].contiguous(), "fp8_656")
    assert torch.equal(quant.dequantize_latent(pool[:, 1], "fp8_656"), want)
    shifted = torch.zeros(4 * 656 + 2, dtype=torch.uint8)[2:].view(4, 656)
    with pytest.raises(ValueError, match=r"dequantize_latent: rows must be on 4-byte bounds"):
        quant.dequantize_latent(shifted, "fp8_656")


K, LATENT, ROPE = torch.zeros(2, 128), torch.zeros(2, 512), torch.zeros(2, 64)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: quant.quantize_keys(torch.zeros(2, 64)), r"quantize_keys: k must be .*128\], got float32 \[2, 64\]"),
        (lambda: quant.quantize_keys(K.int()), "quantize_keys: k must be .*, got int32"),
        (lambda: quant.quantize_keys([1.0]), "quantize_keys: k must be"),
        (lambda: quant.quantize_keys(torch.zeros(128, 2).T), "quantize_keys: k must be contiguous"),
        (lambda: quant.quantize_keys(K, impl="no"), "quantize_keys: impl='no' does not exist"),
        (lambda: quant.quantize_latent(LATENT, ROPE, "fp8"), "quantize_latent: layout must be one of bf16_1152"),
        (lambda: quant.quantize_latent(LATENT, ROPE[:1], "fp8_656"), "quantize_latent: rope must be"),
        (lambda: quant.quantize_latent(LATENT, ROPE, "fp8_576", 0.0), "kv_scale must be a positive finite number"),
        (lambda: quant.quantize_latent(LATENT, ROPE, "fp8_576", math.nan), "kv_scale must be"),
        (lambda: quant.dequantize_latent(LATENT, "fp8_656"), r"dequantize_latent: rows must be a uint8 .*656"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
