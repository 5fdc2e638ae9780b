"""The paths that compute-sanitizer is shown (tests/gpu/sanitize.py): all of ours, and each with a right answer."""

import pytest
import torch

from sglang_dsa_plugin import support, support_row
from sglang_dsa_plugin.kernels.cuda import sparse_mla_portable
from tests.gpu import sanitize


@pytest.mark.full
def test_every_row_of_ours_has_a_path_at_every_sm():
    pytest.importorskip("cuda.core")
    for sm in (80, 90, 120):
        found = {(case.operator, name) for case, name in sanitize.paths("cuda", sm=sm, ours=True)}
        ours = [row for row in support.rows() if row.name in support_row.OURS and sm in row.sm]
        assert found == {(row.operator, row.name) for row in ours}


def test_other_packages_are_left_out_on_request():
    for sm in (80, 90):
        names = {name for _, name in sanitize.paths("cuda", sm=sm, ours=True)}
        assert {"triton"} <= names <= support_row.OURS


def test_what_is_ours_is_what_runs_kernels_of_this_package_on_a_gpu():
    ours = {row.name for row in support.rows() if ".kernels.cuda." in row.target or ".kernels.triton." in row.target}
    assert ours == support_row.OURS


def test_both_ways_of_copying_of_the_portable_kernel_have_a_path():
    most = max(int(case.label.split(" rows")[0].split()[-1]) for case in sanitize._more_attention())
    assert most >= sparse_mla_portable._SPREAD_ROWS


def test_what_builds_a_module_first_is_left_out_unless_asked_for():
    built = {row.name for row in support.rows() if sanitize._builds_first(row)}
    assert built == {"flashinfer", "deep_gemm_flashinfer", "trtllm", "trtllm_fp8"}


@pytest.mark.full
def test_answers_of_the_further_cases_are_right():
    for case in sanitize._more_cases():
        assert case.share(torch.device("cpu"), "torch") <= 1, case.label


def test_the_filter_names_what_is_launched():
    names = set(sanitize.kernel_names())
    assert {"gather_kernel", "merge_kernel", "gather_bf16", "gather_fp8", "rows_kernel", "keys_kernel"} < names
    assert {"_rows_kernel", "rows_kernel", "split_kernel", "slots_kernel", "store_kernel", "queries_kernel"} < names
    assert "select_rows" in names


def test_parts_hold_every_path_once():
    assert sanitize.part("1/1") == (0, 1)
    parts = map(sanitize.part, ("1/3", "2/3", "3/3"))
    assert sorted(at for first, step in parts for at in range(100)[first::step]) == list(range(100))


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "-1/2", ""])
def test_a_part_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="--part"):
        sanitize.part(text)
