"""The support table: every row loads, choices carry reasons, refusals name what is wrong."""

import importlib
import importlib.util
import types

import pytest
import torch

from sglang_dsa_plugin import support, support_row
from sglang_dsa_plugin.support_row import MANY_ROWS, Implementation, Where


@pytest.fixture
def with_fast(monkeypatch):
    """with_fast(**features): the table has sparse attention by "fast", a row with these features, then by torch."""
    torch_row = next(row for row in support.rows("sparse_mla") if row.name == "torch")

    def put(**features) -> None:
        fast = Implementation("sparse_mla", "fast", lambda: None, **features)
        monkeypatch.setattr(support, "_ROWS", (fast, torch_row))
        support._choose.cache_clear()

    yield put
    support._choose.cache_clear()


@pytest.mark.parametrize("row", support.rows(), ids=lambda r: f"{r.operator}-{r.name}")
def test_every_row_loads(row):
    assert callable(row.load())


def test_operators_all_run_on_a_cpu():
    for operator in {row.operator for row in support.rows()}:
        choice = support.choose(operator, device="cpu")
        assert "cpu" in choice.implementation.devices and "cpu" in choice.reason
        # What is compiled by numba may be absent; torch may not.
        assert support.choose(operator, device="cpu", packages="none").name == "torch"


def test_few_rows_of_few_heads_run_on_one_thread_of_a_cpu():
    def chosen(**asked: int) -> str:
        return support.choose("sparse_mla", device="cpu", **asked).name

    assert chosen(rows=1, heads=16) == chosen(rows=15, heads=32) == "numba"
    assert chosen(rows=16, heads=16) == chosen(rows=1, heads=64) == "torch"
    assert "worth it below 16 rows" in support.choose("sparse_mla", device="cpu", rows=16, heads=16).reason


def test_deep_gemm_scores_prefill_where_it_was_measured():
    def chosen(operator: str = "index_select_paged", **other: object) -> str:
        asked = {"sm": 90, "heads": 64, "k": 2048, "dtype": torch.float8_e4m3fn, "rows": 256, "packages": "all"}
        return support.choose(operator, device="cuda", **(asked | other)).name

    assert chosen() == chosen("index_select_ragged") == chosen("index_scores_ragged") == "deep_gemm"
    for other in ({"rows": 255}, {"heads": 32}, {"sm": 100}, {"dtype": torch.bfloat16}, {"packages": "none"}):
        assert chosen(**other) == chosen("index_select_ragged", **other) == "triton", other
    assert chosen("index_scores_paged") == "triton"


def test_deep_gemm_scores_decode_steps_where_it_was_measured():
    """From 16 rows on, if the step makes its schedule once."""

    def chosen(**other: object) -> str:
        asked = {"sm": 90, "heads": 64, "k": 2048, "dtype": torch.float8_e4m3fn, "rows": 16, "packages": "all"}
        return support.choose("index_select_paged", device="cuda", **({"planned": True} | asked | other)).name

    assert chosen() == chosen(rows=1000) == "deep_gemm"
    others = ({"rows": 15}, {"heads": 32}, {"sm": 100}, {"dtype": torch.bfloat16}, {"packages": "none"})
    for other in (*others, {"planned": False}):
        assert chosen(**other) == "triton", other


def test_a_step_that_is_planned_has_a_choice_of_its_own(monkeypatch):
    """By the rows of the step; a row without one goes by one row a request."""

    def row(name, **features):
        return support.Implementation("index_select_paged", name, f"{name}:run", frozenset({"cuda"}), **features)

    many, some = Where(min_rows=256), Where(min_rows=16, below_rows=64)
    table = [row("both", first=many, plans="both:plan", planned=some), row("first", first=many), row("last")]
    monkeypatch.setattr(support, "_ROWS", table)
    support._choose.cache_clear()

    def chosen(rows, planned):
        return support.choose("index_select_paged", device="cuda", sm=90, rows=rows, planned=planned).name

    try:
        assert [chosen(rows, True) for rows in (1, 16, 63, 64, 1000)] == ["last", "both", "both", "last", "last"]
        assert [chosen(rows, False) for rows in (1, 16, 256)] == ["last", "last", "both"]
    finally:
        support._choose.cache_clear()


@pytest.mark.parametrize("operator", ["topk", "topk_slots", "topk_ragged"])
def test_rows_are_selected_in_cuda_where_it_was_measured(operator):
    def choice(**other: object) -> support.Choice:
        asked = {"sm": 90, "k": 2048, "rows": 255, "packages": "all"}
        return support.choose(operator, device="cuda", **(asked | other))

    assert choice().name == choice(rows=1, k=4096).name == choice(rows=4096).name == "cuda"
    assert choice().implementation.capturable
    for other in ({"sm": 100}, {"sm": 80}, {"packages": "none"}):
        assert choice(**other).name == "triton", other
    assert choice(k=4097).name == "torch"
    assert choice(sm=100, impl="cuda").name == "cuda"
    assert "measured on SM 9.0 only" in choice(sm=120).reason
    with pytest.raises(support.NotServed, match=r"built for SM 9\.0, 10\.0, .*, this GPU is SM 8\.0"):
        choice(sm=80, impl="cuda")


def test_deep_gemm_needs_a_toolkit_and_sglangs_leave(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(support_row.importlib.util, "find_spec", lambda package: object())
    monkeypatch.setattr(support_row.shutil, "which", lambda name: None)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("SGLANG_ENABLE_JIT_DEEPGEMM", raising=False)
    why = support_row.unusable.__wrapped__
    assert why("deep_gemm") is None
    monkeypatch.setenv("SGLANG_ENABLE_JIT_DEEPGEMM", "0")
    assert why("deep_gemm") == "deep_gemm is switched off by SGLANG_ENABLE_JIT_DEEPGEMM" and why("flash_mla") is None
    monkeypatch.delenv("SGLANG_ENABLE_JIT_DEEPGEMM")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    assert why("deep_gemm").startswith("deep_gemm compiles at its first call, and there is no CUDA toolkit: no ")


def test_a_package_counts_where_its_condition_holds(monkeypatch, with_fast):
    monkeypatch.setattr(support_row.importlib.util, "find_spec", lambda package: object())
    monkeypatch.setitem(support_row._CONDITIONS, "some", lambda: "is too old")
    with_fast(package=("other", "some"))
    monkeypatch.setattr(support_row, "unusable", support_row.unusable.__wrapped__)
    assert "passed over: fast (some is too old)" in support.choose("sparse_mla", device="cpu").reason
    assert support.choose("sparse_mla", device="cpu", packages="all").name == "fast"
    missing = support.choose("sparse_mla", device="cpu", packages="none")
    assert "passed over: fast (other is not installed)" in missing.reason


def test_unknown_names_are_mistakes_and_not_refusals():
    with pytest.raises(ValueError, match="unknown operator 'nothing'") as operator:
        support.choose("nothing", device="cpu")
    with pytest.raises(
        ValueError, match="impl='numba' does not exist; it has sgl_kernel, flashinfer, torch_topk, cuda, triton, torch"
    ) as name:
        support.choose("topk", device="cpu", impl="numba")
    assert operator.type is name.type is ValueError


@pytest.mark.parametrize(
    ("features", "asked", "why"),
    [
        ({"devices": frozenset({"cuda"})}, {"device": "cpu"}, "runs on cuda, not on cpu"),
        ({"sm": frozenset({90})}, {"device": "cuda", "sm": 120}, "built for SM 9.0, this GPU is SM 12.0"),
        ({"layouts": frozenset({"fp8_656"})}, {"device": "cpu", "layout": "bf16_1152"}, "reads fp8_656, not bf16_1152"),
        ({"heads": frozenset({64, 128})}, {"device": "cpu", "heads": 16}, "takes 64/128 heads, not 16"),
        ({"max_k": 2048}, {"device": "cpu", "k": 2049}, "takes k up to 2048, not 2049"),
        (
            {"dtypes": frozenset({torch.bfloat16})},
            {"device": "cpu", "dtype": torch.float32},
            "takes bfloat16, not float32",
        ),
        ({"package": "no_such_package"}, {"device": "cpu"}, "no_such_package is not installed"),
    ],
)
def test_a_row_that_cannot_serve_is_passed_over_with_its_reason(with_fast, features, asked, why):
    with_fast(**features)
    choice = support.choose("sparse_mla", **asked)
    assert choice.name == "torch"
    elsewhere = asked["device"] not in features.get("devices", asked["device"])
    assert choice.reason.endswith("serves cpu" if elsewhere else f"; passed over: fast ({why})")
    with pytest.raises(support.NotServed, match="impl='fast' cannot run here"):
        support.choose("sparse_mla", impl="fast", **asked)


def test_a_kernel_for_many_rows_is_left_out_below_unless_asked_for(with_fast):
    with_fast(first=Where(min_rows=MANY_ROWS))
    few, many = MANY_ROWS - 1, MANY_ROWS
    assert support.choose("sparse_mla", device="cpu", rows=few).name == "torch"
    assert f"fast (worth it from {many} rows on)" in support.choose("sparse_mla", device="cpu", rows=few).reason
    assert support.choose("sparse_mla", device="cpu", rows=many).name == "fast"
    assert support.choose("sparse_mla", device="cpu", rows=few, impl="fast").name == "fast"


@pytest.mark.parametrize(
    ("sm", "heads", "layout", "rows", "expected"),
    [
        (90, 16, "bf16_1152", 4096, "cuda"),
        (90, 8, "bf16_1152", 16, "cuda"),
        (90, 16, "bf16_1152", 15, "triton"),
        (90, 17, "bf16_1152", 64, "triton"),
        (90, 128, "bf16_1152", 4096, "flash_mla"),
        (90, 64, "bf16_1152", 64, "fa3"),
        (90, 64, "bf16_1152", 15, "triton"),
        (90, 48, "bf16_1152", 64, "triton"),
        (90, 128, "fp8_656", 4096, "flash_mla_kv"),
        (90, 128, "fp8_656", 16, "flash_mla_kv"),
        (90, 128, "fp8_656", 1, "triton"),
        (90, 16, "fp8_656", 4096, "cuda"),
        (90, 16, "fp8_576", 4096, "triton"),
        (100, 128, "fp8_656", 16, "triton"),
        (80, 128, "bf16_1152", 4096, "cuda_portable"),
        (86, 64, "bf16_1152", 16, "cuda_portable"),
        (120, 128, "bf16_1152", 15, "triton"),
        (89, 32, "bf16_1152", 4096, "triton"),
        (100, 128, "bf16_1152", 4096, "triton"),
        (80, 128, "fp8_656", 4096, "cuda_portable_fp8"),
        (80, 64, "fp8_656", 16, "cuda_portable_fp8"),
        (80, 128, "fp8_656", 15, "triton"),
        (80, 32, "fp8_656", 64, "triton"),
        (86, 64, "fp8_656", 16, "cuda_portable_fp8"),
        (89, 128, "fp8_656", 4096, "cuda_portable_fp8"),
        (120, 128, "fp8_656", 64, "cuda_portable_fp8"),
        (89, 32, "fp8_656", 4096, "triton"),
        (120, 16, "fp8_656", 1, "triton"),
        (90, 16, "fp32_2304", 1, "torch"),
        (75, 16, "bf16_1152", 1, "torch"),
    ],
)
def test_sparse_attention_by_gpu(sm, heads, layout, rows, expected):
    dtype = torch.float32 if layout == "fp32_2304" else torch.bfloat16
    choice = support.choose("sparse_mla", device="cuda", sm=sm, layout=layout, heads=heads, rows=rows, dtype=dtype)
    assert choice.name == expected
    assert choice.implementation.capturable == (expected != "torch")


def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch):
    entered = []

    class Tensor:
        device = torch.device("cuda", 1)

    class Entered:
        def __init__(self, device):
            entered.append(device.index)

        def __enter__(self):
            return self

        def __exit__(self, *_args):
            return None

    current = {"index": 0}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current["index"])
    monkeypatch.setattr(torch.cuda, "device", Entered)
    run = support_row.on_its_device(lambda first, second, option=0: (second, option))
    assert run(Tensor(), 5, option=7) == (5, 7) and entered == [1]
    current["index"] = 1
    assert run(Tensor(), 5) == (5, 0) and entered == [1]


def test_a_module_of_a_package_that_is_not_installed_is_not_installed():
    for name in ("no_such_package", "no_such_package.core", "json.no_such_module"):
        assert support_row.unusable(name) == f"{name} is not installed"
    assert support_row.unusable("json.decoder") is None


def test_kernels_in_cuda_cpp_want_a_compiler(monkeypatch):
    features = {"device": "cuda", "sm": 90, "layout": "bf16_1152", "heads": 16, "rows": 64, "dtype": torch.bfloat16}
    support_row.unusable.cache_clear()
    assert support.choose("sparse_mla", **features).name == "cuda"

    def missing(name):
        if name == "cuda.bindings.nvrtc":
            raise RuntimeError("libnvrtc.so.13 cannot be opened")
        return importlib.import_module(name)

    monkeypatch.setattr(support_row, "importlib", types.SimpleNamespace(import_module=missing, util=importlib.util))
    for cached in (support_row.unusable, support._choose, support._measured):
        cached.cache_clear()
    choice = support.choose("sparse_mla", **features)
    assert support_row.unusable("cuda.core") is not None
    assert choice.name == "triton" and "finds no NVRTC to compile with: libnvrtc" in choice.reason
    for cached in (support_row.unusable, support._choose, support._measured):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("archs", "driver", "why"),
    [
        ([80, 90, 100], 13000, None),
        ([80, 90], 13010, None),
        ([75, 80, 89], 13000, "has an NVRTC (13) that does not know SM 9.0"),
        ([80, 90], 12080, "has an NVRTC (13) that is newer than the driver (CUDA 12.8)"),
    ],
)
def test_nvrtc_has_to_fit_the_gpu_and_its_driver(monkeypatch, archs, driver, why):
    good = types.SimpleNamespace(name="NVRTC_SUCCESS")
    nvrtc = types.SimpleNamespace(
        nvrtcResult=types.SimpleNamespace(NVRTC_SUCCESS=good),
        nvrtcVersion=lambda: (good, 13, 0),
        nvrtcGetSupportedArchs=lambda: (good, archs),
    )
    modules = {
        "cuda.bindings.nvrtc": nvrtc,
        "cuda.bindings.driver": types.SimpleNamespace(cuDriverGetVersion=lambda: (0, driver)),
    }
    monkeypatch.setattr(support_row, "importlib", types.SimpleNamespace(import_module=modules.__getitem__))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    assert support_row._why_nvrtc_cannot_serve() == why
