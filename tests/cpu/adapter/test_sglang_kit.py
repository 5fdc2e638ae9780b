"""SGLang's own test kit against this package on a CPU."""

from tests.gpu.test_sglang_kit import check


def test_no_case_fails(tmp_path, record_testsuite_property):
    check("cpu", tmp_path, record_testsuite_property)
