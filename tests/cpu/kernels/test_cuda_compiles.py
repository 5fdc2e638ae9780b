"""CUDA C++ sources compile, without a GPU, for every target they are meant for, within registers and shared memory."""

import pytest

pytest.importorskip("cuda.core")

from sglang_dsa_plugin.kernels.cuda import program, select, tables
from sglang_dsa_plugin.kernels.triton.index_tables import Gpu

CLUSTER_ARCHS = ["sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a"]
SHARED = 48 * 1024  # what a kernel has without asking


@pytest.mark.parametrize("arch", CLUSTER_ARCHS)
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 131072), (16, 131072), (64, 131072)], ids=["held", "twice as many held", "read again"]
)
def test_select(arch, rows, columns):
    if arch != "sm_90a" and rows != 1:
        pytest.skip("one form an architecture")
    shape = tables.select_shape(Gpu("cuda", int(arch[3:-1]), 132, 227), rows, columns)
    _, found = program.compile_only(select.SOURCE, arch, select.defines(shape, select.BOTH, 64))
    takes = found[select.NAME]
    assert takes.registers * shape.threads * shape.blocks <= 65536
    assert takes.shared <= SHARED and takes.spilled <= 400


def test_an_error_names_the_file_and_the_compilers_reason():
    with pytest.raises(RuntimeError, match=r"select.cu does not compile for sm_90a(.|\n)*THREADS"):
        program.compile_only("select.cu", "sm_90a", {})


def test_cubins_are_kept_on_disk_where_there_is_a_place(monkeypatch, tmp_path):
    compiled = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(program, "_compile", lambda *what: compiled.append(what) or b"cubin")
    for defines in ((), (), (("THREADS", "512"),)):
        assert program._cubin("select.cu", "sm_90a", defines) == b"cubin"
    assert len(compiled) == 2
    assert sorted(p.suffix for p in tmp_path.rglob("*") if p.is_file()) == [".cubin", ".cubin"]
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert program._cubin("select.cu", "sm_90a", ()) == b"cubin" and len(compiled) == 3
