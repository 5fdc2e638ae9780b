"""How many blocks share a row in the CUDA C++ kernel of sparse MLA."""

import pytest
import torch

from sglang_dsa_plugin.kernels.cuda import program, sparse_mla, tensor_maps
from sglang_dsa_plugin.kernels.triton import index_tables

# What an H200 (132 multiprocessors) says it holds of clusters of this kernel's blocks.
H200 = {2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}


@pytest.mark.parametrize(
    ("rows", "cluster"),
    [
        (1, 8),
        (15, 8),
        (16, 6),
        (17, 6),
        (18, 5),
        (22, 5),
        (23, 4),
        (30, 4),
        (31, 3),
        (39, 3),
        (40, 2),
        (66, 2),
        (67, 1),
    ],
)
def test_all_rows_run_at_a_time(rows, cluster):
    assert sparse_mla.cluster_of(rows, 132, H200.__getitem__) == cluster


def test_a_row_of_many_is_one_blocks():
    asked = []
    assert sparse_mla.cluster_of(4096, 132, lambda size: asked.append(size) or 0) == 1
    assert not asked


@pytest.mark.parametrize(
    ("rows", "tiles", "picks", "parts"),
    [
        (4096, 1, 2048, [(4092, 1), (4, 8)]),
        (4096, 2, 2048, [(4092, 1), (4, 8)]),
        (8192, 1, 2051, [(8184, 1), (8, 8)]),
        (150, 1, 2048, [(132, 1), (18, 5)]),
        (4096, 3, 2048, [(4092, 1), (4, 8)]),
        (2048, 1, 2048, [(2048, 1)]),  # 68 would be left, for 66 clusters of two
        (4092, 1, 2048, [(4092, 1)]),
        (132, 1, 2048, [(132, 1)]),
        (64, 1, 2048, [(64, 2)]),
        (4096, 1, 512, [(4096, 1)]),
        (5, 200, 2048, [(5, 1)]),
    ],
)
def test_the_rows_that_are_left_are_shared(rows, tiles, picks, parts):
    assert sparse_mla.launches(rows, tiles, picks, 132, H200.__getitem__) == parts


def test_all_rows_are_launched_once():
    for rows in range(1, 700):
        for tiles in (1, 2, 3, 8):
            parts = sparse_mla.launches(rows, tiles, 2048, 132, H200.__getitem__)
            assert sum(count for count, _ in parts) == rows and all(count > 0 for count, _ in parts)
            for count, cluster in parts:
                assert cluster == 1 or (count * tiles <= H200[cluster] and count * tiles * cluster <= 132)


@pytest.fixture
def calls(monkeypatch):
    """(macros, grid, arguments, blocks of a cluster) of every launch on an H200; a map of rows is what it is of."""
    made = []

    class Kernel:
        def __init__(self, macros):
            self.macros = macros

        def clusters_at_once(self, _threads, size):
            return H200[size]

        def launch(self, grid, _threads, arguments, *, cluster, pdl):
            assert pdl
            made.append((self.macros, grid, [getattr(a, "value", a) for a in arguments], cluster))

    monkeypatch.setattr(program, "kernel", lambda _source, _name, _device, macros, **_: Kernel(macros))
    monkeypatch.setattr(index_tables, "gpu_of", lambda _: index_tables.Gpu("cuda", 90, 132, 227))
    monkeypatch.setattr(tensor_maps, "of_rows", lambda kv_rows: ("map", kv_rows.data_ptr()))
    return made


@pytest.mark.parametrize(("rows", "heads"), [(150, 16), (135, 5), (60, 40), (4100, 3), (16, 8), (100, 16), (70, 8)])
def test_each_launch_is_handed_its_own_rows(calls, rows, heads):
    """Tensors that are strided in every way, and rows that are launched in two parts."""
    nope = torch.zeros(heads, rows, 512, dtype=torch.bfloat16).transpose(0, 1)
    rope = torch.zeros(rows, heads, 192, dtype=torch.bfloat16)[..., 128:]
    slots = torch.zeros(rows, 2100, dtype=torch.int64)[:, :2048]
    lengths = torch.full((rows,), 5, dtype=torch.int32)
    out = torch.zeros(rows, 2 * heads, 600, dtype=torch.bfloat16)[:, ::2, 4:516]
    kv, sink = torch.zeros(50, 576, dtype=torch.bfloat16), torch.zeros(heads)
    got, lse = sparse_mla.sparse_mla(nope, kv, slots, 1.0, "bf16_1152", 1.0, sink, lengths, out, rope)
    assert got is out
    first, tiles = 0, -(-heads // 16)
    for macros, grid, given, cluster in calls:
        own = (nope, rope, kv, slots, lengths, sink, out, lse)
        assert given[:8] == [(t if t is kv or t is sink else t[first:]).data_ptr() for t in own]
        assert given[8:16] == [*nope.stride()[:2], *rope.stride()[:2], 1152, 2100, *out.stride()[:2]]
        items = given[19]
        assert given[16:19] == [50, heads, 2048] and items % tiles == 0
        assert macros["CLUSTER"] == cluster and grid == (min(items, 132) if cluster == 1 else items)
        assert macros["HEADS"] == (8 if cluster == 1 and heads <= 8 else 16)
        assert macros["TENSOR_COPIES"] == (cluster == 1)
        assert macros["OWN_MAXIMA"] == (cluster == 1 and (items > 132 or heads <= 8))
        assert given[21:] == ([("map", kv.data_ptr())] if cluster == 1 else [])
        first += items // tiles
    assert first == rows


@pytest.mark.parametrize("layout", sorted(sparse_mla.FORMS))
def test_what_the_tensor_unit_cannot_copy_comes_another_way(calls, layout):
    """Rows that overlap, and packed ones, of which it gets no map."""
    kv = torch.zeros(1, 576, dtype=torch.bfloat16) if layout == "bf16_1152" else torch.zeros(1, 656, dtype=torch.uint8)
    q, slots = torch.zeros(150, 16, 576, dtype=torch.bfloat16), torch.zeros(150, 64, dtype=torch.int32)
    sparse_mla.sparse_mla(q, kv.expand(50, -1), slots, 1.0, layout)
    [(macros, _, given, cluster)] = calls
    assert cluster == 1 and macros["TENSOR_COPIES"] == 0 and len(given) == 21
