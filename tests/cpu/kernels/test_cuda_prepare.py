"""Which CUDA C++ kernels a server loads at its start: all that its steps may take, and each once."""

import random
import threading

import pytest
import torch

from sglang_dsa_plugin.kernels.cuda import (
    latent_rows,
    prepare,
    program,
    select,
    sparse_mla,
    sparse_mla_portable,
    tables,
)
from sglang_dsa_plugin.kernels.triton import index_tables

H200 = index_tables.Gpu("cuda", 90, 132, 227)


@pytest.mark.parametrize("columns", [100, 2048, 7088, 131136, 1 << 20])
def test_every_launch_that_rows_and_columns_lead_to_is_known(columns):
    known = tables.select_shapes(H200, columns, 2048, 64)
    assert len(set(known)) == len(known) < 24
    rng = random.Random(0)
    for _ in range(3000):
        rows, width = rng.choice([rng.randrange(1, 256), 256, 5000]), rng.randrange(1, columns + 1)
        assert tables.launch_shape(H200, rows, width, 2048, 64) in known


@pytest.mark.parametrize("layout", sorted(sparse_mla.FORMS))
@pytest.mark.parametrize("heads", [8, 16])
def test_every_form_of_attention_that_rows_lead_to_is_known(layout, heads):
    form = sparse_mla.FORMS[layout]
    known = [macros for source, _, macros, _ in prepare.server_forms(H200, 0, 2048, layout) if source == form.source]
    at_once = {2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}  # clusters of an H200
    for rows in (*range(1, 300), 1024, 4096):
        for count, blocks in sparse_mla.launches(rows, 1, 2048, H200.processors, at_once.__getitem__):
            asked = {"lengths": True, "sink": False, "wide_slots": False, "heads": heads}
            assert form.defines(blocks, walks=count > H200.processors, **asked) in known


def test_nothing_is_loaded_where_nothing_is_taken():
    for gpu in (index_tables.Gpu("cuda", 80, 108, 163), index_tables.Gpu("cuda", 100, 148, 227)):
        assert prepare.server_forms(gpu, 131072, 2048, None) == []
    assert prepare.server_forms(H200, 0, 2048, "fp8_576") == []


@pytest.mark.parametrize(("sm", "shared"), [(80, 163), (86, 99), (120, 99)])
@pytest.mark.parametrize("layout", sparse_mla_portable.LAYOUTS)
def test_all_forms_of_the_portable_kernel_are_loaded(sm, shared, layout):
    """Few rows are shared out, and their parts joined; many are not, and copies of very many bf16 rows are spread."""
    gpu = index_tables.Gpu("cuda", sm, 108, shared)
    forms = prepare.server_forms(gpu, 0, 2048, None, (layout, 128, 16))
    found = [(0, 0), (0, 1), (1, 0)] if (layout, shared) == ("bf16_1152", 163) else [(0, 0), (1, 0)]
    assert sorted((macros["PARTIAL"], macros["SPREAD"]) for _, _, macros, _ in forms) == found
    for rows in (16, 64, 511, 512, 4096):
        plan = sparse_mla_portable.choose(gpu, layout, rows, 128, 2048)
        macros = plan.defines(lengths=True, sink=False, wide_slots=False, pdl=sm >= 90)
        assert (sparse_mla_portable.SOURCE, sparse_mla_portable.NAME, macros, plan.shared_bytes) in forms


@pytest.mark.parametrize(("fewest", "partial"), [(16, [0]), (1, [0, 1])])
def test_with_few_processors_only_fewer_rows_are_shared_out(fewest, partial):
    """Which the portable kernel gets where it was asked for by name."""
    gpu = index_tables.Gpu("cuda", 86, 28, 99)
    forms = prepare.server_forms(gpu, 0, 2048, None, ("bf16_1152", 128, fewest))
    assert sorted(macros["PARTIAL"] for _, _, macros, _ in forms) == partial
    for rows in range(fewest, 300):
        plan = sparse_mla_portable.choose(gpu, "bf16_1152", rows, 128, 2048)
        macros = plan.defines(lengths=True, sink=False, wide_slots=False, pdl=False)
        assert (sparse_mla_portable.SOURCE, sparse_mla_portable.NAME, macros, plan.shared_bytes) in forms


@pytest.mark.parametrize("layout", sorted(sparse_mla.FORMS))
def test_each_form_is_loaded_once_on_the_device_asked_for(monkeypatch, layout):
    loaded, lock = [], threading.Lock()

    def kernel(source, name, device, defines, *, shared_bytes):
        with lock:
            loaded.append((source, name, device.index, tuple(sorted(defines.items())), shared_bytes))

    monkeypatch.setattr(program, "kernel", kernel)
    monkeypatch.setattr(index_tables, "gpu_of", lambda device: H200)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    count = prepare.prepare(torch.device("cuda"), 131136, 2048, layout)
    assert count == len(loaded) == len(set(loaded)) and {one[2] for one in loaded} == {3}
    sources = [one[0] for one in loaded]
    # Up to 8 heads have a form of their own, and of bf16 rows more rows than blocks.
    attends = sparse_mla.MOST_BLOCKS + 1 + (layout == "bf16_1152")
    assert sources.count(sparse_mla.FORMS[layout].source) == attends
    selects = sources.count(select.SOURCE), sources.count(select.MANY_SOURCE)
    stores = sources.count(latent_rows.SOURCE)
    assert stores == (layout == "bf16_1152")
    assert min(selects) > 0 and sum(selects) == count - attends - stores


def test_what_does_not_compile_is_an_error_at_once(monkeypatch):
    def kernel(*_arguments, **_named):
        raise RuntimeError("select.cu does not compile for sm_90a: expected a declaration")

    monkeypatch.setattr(program, "kernel", kernel)
    monkeypatch.setattr(index_tables, "gpu_of", lambda device: H200)
    with pytest.raises(RuntimeError, match=r"select.cu does not compile"):
        prepare.prepare(torch.device("cuda", 0), 8192, 2048, None)


def test_nothing_is_loaded_where_nothing_can_be_compiled(monkeypatch):
    monkeypatch.setattr(prepare, "unusable", lambda package: f"{package} finds no NVRTC to compile with")
    monkeypatch.setattr(index_tables, "gpu_of", lambda device: H200)
    monkeypatch.setattr(program, "kernel", lambda *_, **__: pytest.fail("compiles"))
    assert prepare.prepare(torch.device("cuda", 0), 8192, 2048, "bf16_1152") == 0


def test_whoever_forces_triton_gets_its_selection(monkeypatch):
    monkeypatch.setattr(index_tables, "gpu_of", lambda device: H200)
    assert select.preferred(torch.device("cuda", 0), 4, 8192, 2048, 64)
    monkeypatch.setenv("SGLANG_DSA_PLUGIN_IMPL", "triton")
    assert not select.preferred(torch.device("cuda", 0), 4, 8192, 2048, 64)
