"""The kernels of the indexer's front, of latent rows and of expanded keys compile, without a GPU, for every target."""

import pytest

pytest.importorskip("triton")

from sglang_dsa_plugin.cache.layouts import LATENT_DIM
from sglang_dsa_plugin.kernels.triton import e4m3, index_front, latent_rows, mha_keys, pdl
from tests.cpu.kernels.sass import assert_sound, reads_before_writes
from tests.cpu.kernels.test_triton_index_compiles import SHARED, compiled, gpu_of

pytestmark = pytest.mark.full

FLOATS = {"projected": "*bf16", "weight": "*fp32", "bias": "*fp32", "cos_sin": "*fp32", "eps": "fp32"}
INDICES = {"positions": "*i64", "slots": "*i64"}


def constants(name, layout, fp8):
    return {
        "HALF": layout == "half",
        "FP8_KEYS": fp8,
        "CVT": e4m3.has_cvt(gpu_of(name)),
        "TILE": index_front.TILE,
        "DIM": 128,
        "ROPE": 64,
        "NORM": 128**-0.5,
    }


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize(("layout", "fp8"), [("half", True), ("interleaved", False)])
def test_keys(name, layout, fp8):
    with_scale = {"pages": "*u8" if fp8 else "*bf16", "scales": "*fp32" if fp8 else "*bf16"}
    fixed = constants(name, layout, fp8) | {"LAYER": fp8, "PAGE": 64}
    types = FLOATS | INDICES | with_scale
    assert_sound(compiled(index_front.keys_kernel, name, fixed, index_front.WARPS, **types))


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize(("layout", "fp8"), [("half", True), ("interleaved", False)])
def test_queries(name, layout, fp8):
    types = {"weights": "*fp32", "q": "*u8" if fp8 else "*bf16", "gate": "*fp32", "gate_factor": "fp32"}
    for warps, skip in ((index_front.WARPS, False), (index_front.MANY_WARPS, True)):
        fixed = constants(name, layout, fp8) | {"HEADS": 64, "SKIP": skip}
        built = compiled(index_front.queries_kernel, name, fixed, warps, **FLOATS, **INDICES, **types)
        assert_sound(built)


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize(("layout", "fp8"), [("half", True), ("interleaved", False)])
def test_both(name, layout, fp8):
    types = {"key": "*bf16", "query": "*bf16", "weights": "*fp32", "gate": "*fp32", "gate_factor": "fp32"}
    types |= {"pages": "*u8" if fp8 else "*bf16", "scales": "*fp32" if fp8 else "*bf16", "q": "*u8" if fp8 else "*bf16"}
    fixed = constants(name, layout, fp8) | {"HEADS": 64, "SKIP": True, "LAYER": fp8, "PAGE": 64}
    built = compiled(index_front.front_kernel, name, fixed, index_front.WARPS, **FLOATS, **INDICES, **types)
    assert_sound(built)
    if pdl.arguments(gpu_of(name))["PDL"]:
        # Nothing is read ahead of the wait for the kernel before, but fetched.
        ahead = built.asm["ptx"].split("griddepcontrol.wait")[0]
        assert "prefetch.global.L2" in ahead and "ld.global" not in ahead


KINDS = [("cast", "*bf16", "*bf16", "*bf16"), ("blocks", "*u8", "*fp32", "*bf16"), ("unit", "*u8", "*u8", "*u8")]
ROW = {"ROWS": latent_rows.ROWS, "BLOCKS": LATENT_DIM // 128, "BLOCK": 128, "ROPE": 64, "SCALES_AT": 128}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize(("kind", "rows", "scales", "turned"), KINDS)
def test_latent_rows(name, kind, rows, scales, turned):
    fixed = ROW | {"KIND": kind, "ROPE_AT": 264, "CVT": e4m3.has_cvt(gpu_of(name))}
    types = {"latent": "*bf16", "rope": "*bf16", "rows": rows, "scales": scales, "turned": turned, "kv_scale": "fp32"}
    assert_sound(compiled(latent_rows.store_kernel, name, fixed, latent_rows.ROWS, **INDICES, **types))


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize(("kind", "rows", "scales", "turned"), KINDS)
def test_reading_latent_rows(name, kind, rows, scales, turned):
    types = {"rows": rows, "scales": scales, "turned": turned, "kv_scale": "fp32", "out": "*bf16", "out_rope": "*bf16"}
    fixed = ROW | {"KIND": kind, "ROPE_AT": 264}
    assert_sound(compiled(latent_rows.load_kernel, name, fixed, latent_rows.ROWS, **INDICES, **types))


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize(("heads", "width"), [(16, 128), (128, 128), (8, 192)])
def test_keys_put_together(name, heads, width):
    fixed = mha_keys.shape(heads, width, 64)
    warps = fixed.pop("num_warps")
    types = {"nope": "*bf16", "rope": "*bf16", "out": "*bf16"}
    assert_sound(compiled(mha_keys.join_kernel, name, fixed, warps, **types))


def test_code_that_reads_what_is_not_written_yet_is_seen():
    sound = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   S2R R4, SR_TID.X ;
        /*0020*/              @!P1 LDG.E.64 R26, desc[UR10][R4.64] ;
        /*0030*/                   SHFL.BFLY PT, R31, R26, 0x4, 0x1f ;
        /*0040*/                   PRMT R7, R31, 0x7610, R7 ;
        /*0050*/                   STG.E desc[UR10][R26.64+0x200], R7 ;
        /*0060*/                   ISETP.GT.U32.AND P1, PT, R27, -0x1, PT ;
    """
    assert reads_before_writes(sound) == []
    early = sound.replace("S2R R4, SR_TID.X", "LOP3.LUT R7, R7, 0xffff, RZ, 0xc0, !PT")
    assert [line.split()[0] for line in reads_before_writes(early)] == ["0010", "0020"]
