"""The sum over index heads is in every kernel and tile the same one, rounded in the same places.

Read from what the compiler makes of them without a GPU: it may fuse a product with the sum that takes it, and where two
products are added either of the two, so that one of them is rounded twice and the other once.
"""

import re

import pytest

triton = pytest.importorskip("triton")

from sglang_dsa_plugin.kernels.triton import index_scores_kernels, index_scores_row, index_tables  # noqa: E402
from tests.cpu.kernels.ptx_sums import sums  # noqa: E402
from tests.cpu.kernels.test_triton_index_compiles import compiled, gpu_of, kinds, score_types  # noqa: E402

full = pytest.mark.full  # a kernel takes seconds to compile


def streamed(name, kind, heads, rows, requests):
    """PTX of the kernel that streams keys, as rows of so many requests are given it; a single row has its own."""
    tiles = index_tables.stream_tiles(gpu_of(name), kind, heads, rows, requests)
    constants = {"H": heads, "HP": heads, "BN": tiles.keys, "KIND": kind, "STAGES": tiles.stages, "FILL": False}
    kernel = index_scores_row.row_kernel
    if rows > 1:
        constants |= {"G": tiles.bundle, "ROWS": index_tables.power_of_two(rows)}
        kernel = index_scores_kernels.keys_kernel
    return compiled(kernel, name, constants, tiles.warps, **score_types(kind)).asm["ptx"]


def walked(name, kind, heads, rows, paged):
    """PTX of the kernel that walks over rows."""
    tiles = index_tables.walk_tiles(gpu_of(name), kind, heads, rows, 4096)
    constants = {"H": heads, "HP": heads, "G": tiles.bundle, "BN": tiles.keys, "KIND": kind, "PAGED": paged}
    constants |= {"ROWS": tiles.rows, "STAGES": tiles.stages}
    kernel = index_scores_kernels.rows_kernel
    return compiled(kernel, name, constants, tiles.warps, **score_types(kind)).asm["ptx"]


def in_order(heads, period, scaled):
    """The sum as `head_sum` writes it down."""

    def of_thread(first):
        total = "0"
        for head in (h + d for h in range(first, heads, period) for d in (0, 1)):
            total = f"fma(h{head},w,{total})"
        return total

    parts = [of_thread(first) for first in range(0, period, 2)]
    while len(parts) > 1:
        parts = [f"add({','.join(sorted(pair))})" for pair in zip(parts[::2], parts[1::2])]
    return f"mul({parts[0]},w)" if scaled else parts[0]


@pytest.mark.parametrize(
    ("kind", "heads"),
    [("fp8", 16), *(pytest.param(kind, heads, marks=full) for kind in ("fp8", "plain") for heads in (16, 32, 64, 128))],
)
def test_one_sum_in_every_form(kind, heads, request):
    """On SM 9.0, where a place in the product says which head it is of. Both kernels have two loops or branches."""
    forms = {"one row": streamed("sm_90", kind, heads, 1, 1), "many rows": walked("sm_90", kind, heads, 300, True)}
    if request.node.get_closest_marker("full"):
        forms["rows"] = streamed("sm_90", kind, heads, 64, 64)
        forms["bundles"] = streamed("sm_90", kind, heads, 8, 4)
        forms["long walk"] = walked("sm_90", kind, heads, 4096, True)
        forms["short walk, ragged"] = walked("sm_90", kind, heads, 2, False)
    want = {in_order(heads, index_tables.head_period(gpu_of("sm_90")), scaled=kind == "fp8")}
    assert {form: sums(ptx, heads) for form, ptx in forms.items()} == dict.fromkeys(forms, want)


@pytest.mark.parametrize("heads", [16, pytest.param(64, marks=full)])
@pytest.mark.parametrize("name", ["sm_89", *(pytest.param(f"sm_{sm}", marks=full) for sm in (80, 90, 100, 120))])
def test_no_product_is_left_to_be_fused(name, heads):
    """On every kind of GPU and for every kind of keys: products enter a sum by `fma` alone, equally many in a line."""
    for kind in (*kinds(name), "f32"):
        found = sums(streamed(name, kind, heads, 1, 1), heads) | sums(walked(name, kind, heads, 300, True), heads)
        assert found
        for expression in found:
            inside = expression.removeprefix("mul(")  # the key's scale, with which the sum ends
            assert "mul" not in inside, expression
            lines = {len(line) for line in re.findall(r"(?:fma\(h?\d*,?w?,)+", re.sub(r"h\d+", "h", inside))}
            assert len(lines) == 1, expression
