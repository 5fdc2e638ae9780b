"""Every kernel of the indexer compiles, without a GPU, for every target it is meant for, within its shared memory."""

import itertools

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from sglang_dsa_plugin.kernels.triton import (  # noqa: E402
    index_scores_kernels,
    index_scores_row,
    index_tables,
    pdl,
    select,
    step_rows,
)

# Minutes with an empty kernel cache: in the long form only.
pytestmark = pytest.mark.full

# Shared memory a program may have, in KiB.
SHARED = {
    "sm_80": 163,
    "sm_86": 99,
    "sm_89": 99,
    "sm_90": 227,
    "sm_100": 227,
    "sm_120": 99,
    "gfx942": 64,
    "gfx950": 160,
}
POINTERS = {"fp8": "*fp8e4nv", "bytes": "*u8", "plain": "*bf16", "f32": "*fp32"}
TYPES = {
    **dict.fromkeys(("scores", "scales", "gate"), "*fp32"),
    **dict.fromkeys(
        (
            "lengths",
            "starts",
            "table",
            "requests",
            "offsets",
            "counts",
            "tickets",
            "first",
            "last",
            "positions",
            "slots",
            "out",
            "slots_out",
        ),
        "*i32",
    ),
    "lists": "*i64",
}


def gpu_of(name):
    if name.startswith("gfx"):
        return index_tables.Gpu("hip", int(name[3:5]), 256, SHARED[name])
    return index_tables.Gpu("cuda", int(name[3:]), 132, SHARED[name])


def compiled(kernel, name, constants, warps, **types):
    signature, aligned, options = {}, {}, {"num_warps": warps}
    if "PERIOD" in kernel.arg_names:
        constants = constants | {"PERIOD": index_tables.head_period(gpu_of(name))}
    if "PDL" in kernel.arg_names:
        given = pdl.arguments(gpu_of(name))
        constants = constants | {"PDL": given.pop("PDL")}
        options |= given
    for i, parameter in enumerate(kernel.params):
        if parameter.name in constants:
            signature[parameter.name] = "constexpr"
            continue
        kind = {**TYPES, **types}.get(parameter.name, "i32")
        signature[parameter.name] = kind
        aligns = kind.startswith("*") or parameter.name.endswith("stride")
        if aligns and parameter.name not in kernel.do_not_specialize:
            aligned[(i,)] = [["tt.divisibility", 16]]
    target = GPUTarget("hip", name, 64) if name.startswith("gfx") else GPUTarget("cuda", int(name[3:]), 32)
    result = triton.compile(ASTSource(kernel, signature, constants, aligned), target=target, options=options)
    assert result.metadata.shared <= SHARED[name] * 1024
    return result


def kinds(name):
    return ("bytes" if name in ("sm_80", "sm_86") or name.startswith("gfx") else "fp8", "plain")


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize(
    ("rows", "k", "write"),
    [(1, 2048, "slots"), (1, 2048, "both"), (4096, 4096, "positions"), (4096, 2048, "both")],
    ids=["split", "split both", "rows", "rows both"],
)
def test_selection(name, rows, k, write):
    tiles = index_tables.select_tiles(gpu_of(name), rows, 131072, k)
    constants = {"C": tiles.capacity, "TILE": tiles.tile, "BLOCK": tiles.block, "SAMPLE": tiles.sample, "PAGE": 64}
    constants |= {"WIDE_READ": True, "STARTS": False, "WRITE": write, "OFFSETS": write == "positions"}
    if tiles.chunks > 1:
        compiled(select.split_kernel, name, constants | {"CHUNKS": tiles.chunks}, tiles.warps)
    else:
        compiled(select.rows_kernel, name, constants, tiles.warps)


def score_types(kind):
    return {"q": "*fp16" if kind == "bytes" else POINTERS[kind], "k": POINTERS[kind], "out": "*fp32"}


@pytest.mark.parametrize("name", SHARED)
def test_scores_of_many_rows(name):
    quantised, plain = kinds(name)
    for kind, heads in ((quantised, 64), (plain, 16), *itertools.product((quantised, plain), (128, 100))):
        tiles = index_tables.walk_tiles(gpu_of(name), kind, heads, 4096, 131072)
        constants = {
            "H": heads,
            "HP": index_tables.padded_heads(heads),
            "G": tiles.bundle,
            "BN": tiles.keys,
            "ROWS": tiles.rows,
            "KIND": kind,
        }
        constants |= {"PAGED": kind != "plain", "STAGES": tiles.stages}
        compiled(index_scores_kernels.rows_kernel, name, constants, tiles.warps, **score_types(kind))


@pytest.mark.parametrize("name", SHARED)
def test_scores_of_few_rows(name):
    quantised, plain = kinds(name)
    shapes = ((quantised, 64, 64), (quantised, 32, 16), (plain, 64, 32), (quantised, 128, 64), (quantised, 100, 64))
    for kind, heads, requests in shapes:
        tiles = index_tables.stream_tiles(gpu_of(name), kind, heads, 64, requests)
        constants = {
            "H": heads,
            "HP": index_tables.padded_heads(heads),
            "G": tiles.bundle,
            "BN": tiles.keys,
            "ROWS": 64,
            "KIND": kind,
        }
        constants |= {"STAGES": tiles.stages, "FILL": heads == 32}
        compiled(index_scores_kernels.keys_kernel, name, constants, tiles.warps, **score_types(kind))


@pytest.mark.parametrize("name", SHARED)
def test_scores_of_a_single_row(name):
    for kind in kinds(name):
        tiles = index_tables.stream_tiles(gpu_of(name), kind, 64, 1, 1)
        constants = {"H": 64, "HP": 64, "BN": tiles.keys, "KIND": kind}
        constants |= {"STAGES": tiles.stages, "FILL": kind == "plain"}
        built = compiled(index_scores_row.row_kernel, name, constants, tiles.warps, **score_types(kind))
        if SHARED[name] == 227:
            # Of 228 KiB, of which each program takes one more: room for two and no other block (index_tables).
            assert 2 * (built.metadata.shared + 1024) <= 228 * 1024 < 3 * (built.metadata.shared + 1024)
        if pdl.arguments(gpu_of(name))["PDL"]:
            # Ahead of the wait, of which each branch may have one, only what leaves nothing in the L1 cache, where it
            # might be out of date.
            ptx = built.asm["ptx"]
            ahead = ptx.rpartition("griddepcontrol.wait")[0]
            assert "cp.async.bulk.prefetch.L2" in ahead and ahead.count("ld.global") == ahead.count("ld.global.cg")
            assert all(ahead.count(own) == ptx.count(own) for own in ("prefetch", "ld.global.cg"))


@pytest.mark.parametrize("name", SHARED)
def test_small_kernels(name):
    compiled(index_scores_kernels.fill_kernel, name, {"PAGED": True}, 4, out="*fp32")
    types = dict.fromkeys(("page_table", "sizes", "numbers"), "*i32")
    compiled(step_rows._rows_kernel, name, {"PAGE": 64, "BLOCK": 1024}, 4, **types)
    compiled(step_rows._clear_kernel, name, {"BLOCK": 512}, 4, **types)
    compiled(select.slots_kernel, name, {"PAGE": 64, "BLOCK": 1024}, 4)
