"""The built-in's side of the kernel benchmark, against stand-ins for the packages that compute what theirs document.

So every rival gets its inputs in the form its kernel reads and answers the same question as ours; and the names of the
arguments are those of the packages installed here, whose sources are read, not imported.
"""

import ast
import contextlib
import functools
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sglang_dsa_plugin.ops import dense_mha, index_scores, mha_keys, quant, select, sparse_mla
from sglang_dsa_plugin.tools import bench_agreement, bench_cache_cases, bench_cases
from sglang_dsa_plugin.tools.bench_inputs import Maker
from tests.cpu.test_bench_kernels import TINY

FLASH_ATTENTION, FLASH_MLA = "sgl_kernel.flash_attn", "flash_mla"
TOPK = "sglang.kernels.ops.attention.dsv4.topk"
INDEXER = "sglang.kernels.ops.attention.dsa.indexer_"
CONCAT = "sglang.kernels.ops.attention.concat_mla"
# Where a package defines what it exports, if not in the module that it is imported from.
DEFINED = {"flash_mla": "flash_mla/flash_mla_interface.py", "sgl_kernel": "sgl_kernel/top_k.py"}
# Module, function, number of positional arguments, names of the others.
CALLS: list[tuple[str, str, int, tuple[str, ...]]] = []


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    qv=None,
    cache_seqlens=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    softmax_scale=None,
    causal=False,
    softcap=0.0,
    num_splits=0,
    return_softmax_lse=False,
):
    count = k_cache.shape[0]
    assert k_cache.shape[1:] == (1, 1, 64) and v_cache.shape[1:] == (1, 1, 512) and max_seqlen_q == 1 and causal
    assert cu_seqlens_q.tolist() == list(range(q.shape[0] + 1)) and cu_seqlens_k_new.diff().equal(cache_seqlens)
    rows = torch.cat((v_cache.reshape(count, 512), k_cache.reshape(count, 64)), dim=1)
    both = torch.cat((qv, q), dim=2)
    return sparse_mla.reference(both, rows, page_table, softmax_scale, "bf16_1152", lengths=cache_seqlens)[0]


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None, causal=False
):
    assert causal and max_seqlen_q == max_seqlen_k == len(q)
    return dense_mha.reference(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale)[0]


def flash_mla_sparse_fwd(
    q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, use_legacy=False, return_log2_lse=None
):
    assert q.shape[1] in (64, 128) and kv.shape[1:] == (1, 576) and use_legacy and d_v == 512 and return_log2_lse
    return sparse_mla.reference(q, kv[:, 0], indices[:, 0], sm_scale, "bf16_1152", lengths=topk_length)[0], None, None


@dataclass
class FlashMLASchedMeta:
    tile_scheduler_metadata: object = None
    num_splits: object = None


def get_mla_decoding_metadata(
    seqlens_k, num_q_tokens_per_head_k, h_k, h_q=None, is_fp8_kvcache=False, topk=None, use_legacy=False
):
    assert (h_k, h_q, is_fp8_kvcache, use_legacy) == (1, num_q_tokens_per_head_k, True, True)
    return ("schedule", len(seqlens_k), h_q, topk), "splits"


def flash_mla_with_kvcache(
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    tile_scheduler_metadata,
    softmax_scale=None,
    is_fp8_kvcache=None,
    indices=None,
    use_legacy=False,
    kv_format=None,
):
    rows, one, heads, _ = q.shape
    assert one == 1 and heads in (64, 128) and k_cache.shape[1:] == (64, 1, 656) and k_cache.dtype.itemsize == 1
    assert (is_fp8_kvcache, use_legacy, kv_format, head_dim_v) == (True, True, "V32", 512)
    assert tile_scheduler_metadata.tile_scheduler_metadata == ("schedule", rows, heads, indices.shape[2])
    cache = k_cache.view(torch.uint8).view(-1, 656)
    out, _ = sparse_mla.reference(q[:, 0], cache, indices[:, 0], softmax_scale, "fp8_656")
    return out.unsqueeze(1), None


def get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms):
    assert context_lens.dim() == 2 and context_lens.dtype == torch.int32 and block_kv == 64
    return "schedule", num_sms


def fp8_paged_mqa_logits(
    q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits=False
):
    rows = q.shape[0]
    assert q.shape[1] == 1 and kv_cache.shape[1:] == (64, 1, 132) and schedule_meta == ("schedule", 132)
    lengths, owner = context_lens.squeeze(1), torch.arange(rows)
    pages = kv_cache.view(-1, 8448)
    return index_scores.reference_paged(
        q[:, 0], pages, weights, lengths, block_table, owner, max_context_len
    ).float()  # fmt: skip


def fp8_mqa_logits(q, kv, weights, ks, ke, clean_logits=False):
    return index_scores.reference_ragged(q, *kv, weights, ks, ke, kv[0].shape[0]).float()


def plan_topk_v2(seq_lens):
    return "plan"


def topk_transform_paged_v2(scores, seq_lens, page_tables, out_page_indices, page_size, metadata):
    assert metadata == "plan" and page_size == 64 and scores.stride(0) % 4 == 0
    picks = select.reference(scores, seq_lens, out_page_indices.shape[1])
    out_page_indices.copy_(select.reference_slots(picks, page_tables, torch.arange(len(picks))))


def topk_transform_ragged_v2(scores, seq_lens, out_offsets, out_indices, row_starts=None):
    picks = select.reference(scores, seq_lens, out_indices.shape[1], row_starts)
    out_indices.copy_(torch.where(picks < 0, -1, picks + out_offsets[:, None]))


def fast_topk_transform_fused(score, lengths, page_table_size_1, cu_seqlens_q, topk, row_starts=None):
    assert cu_seqlens_q.tolist() == [0, len(score)] and page_table_size_1.shape[0] == 1
    picks = select.reference(score, lengths, topk, row_starts)
    return torch.where(picks < 0, -1, page_table_size_1[0][picks.clamp(min=0).long()])


def fused_q_indexer_rope_first_quant(q_input, weight, weight_scale, cos_sin_cache, positions):
    assert q_input.dim() == 3 and weight.shape == q_input.shape[:2] and cos_sin_cache.dtype == torch.float32
    return q_input.to(torch.float8_e4m3fn), (weight.float() * weight_scale).unsqueeze(2)


def fused_k_indexer_norm_rope_store(
    k_input, cache, out_cache_loc, weight, bias, eps, cos_sin_cache, positions, page_size
):
    assert k_input.shape[1] == 128 and cache.shape[1] == 8448 and out_cache_loc.dtype == torch.int64


def concat_mla_absorb_q(a, b):
    return torch.cat((a, b), dim=-1)


def concat_mla_k(k, k_nope, k_rope):
    assert k_nope.shape[1] == 128 and k_rope.shape[1:] == (1, 64)
    k.copy_(mha_keys.reference(k_nope, k_rope[:, 0]))


def concat_and_cast_mha_k_triton(k, k_nope, k_rope):
    assert k_rope.shape[1:] == (1, 64)
    k.copy_(mha_keys.reference(k_nope, k_rope[:, 0]))


def set_mla_kv_buffer_triton(kv_buffer, loc, cache_k_nope, cache_k_rope, *, reserved_skip_index=0):
    assert kv_buffer.shape[1] == cache_k_nope.shape[1] == cache_k_rope.shape[1] == 1 and loc.min() > reserved_skip_index
    kv_buffer[loc] = torch.cat((cache_k_nope, cache_k_rope), dim=2)


def get_mla_kv_buffer_triton(kv_buffer, loc, cache_k_nope, cache_k_rope=None):
    assert kv_buffer.shape[1] == 1
    cache_k_nope.copy_(kv_buffer[loc][..., :512])
    cache_k_rope.copy_(kv_buffer[loc][..., 512:])


def quantize_k_cache_separate(k_nope, k_rope, tile_size=128):
    rows = quant.reference_quantize_latent(k_nope[:, 0], k_rope[:, 0], "fp8_656")
    return rows[:, None, :528], rows[:, None, 528:]


def dequantize_k_cache_paged_dsa(quant_k_cache, page_table_1_flattened, group_size=128):
    assert quant_k_cache.dtype == torch.float8_e4m3fn and quant_k_cache.shape[1:] == (1, 656)
    rows = quant_k_cache[:, 0].view(torch.uint8)[page_table_1_flattened]
    return quant.reference_dequantize_latent(rows, "fp8_656").bfloat16().unsqueeze(1)


STAND_INS = {
    FLASH_ATTENTION: (flash_attn_with_kvcache, flash_attn_varlen_func),
    "sgl_kernel": (fast_topk_transform_fused,),
    FLASH_MLA: (flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_decoding_metadata),
    "flash_mla.flash_mla_interface": (FlashMLASchedMeta,),
    "deep_gemm": (get_paged_mqa_logits_metadata, fp8_paged_mqa_logits, fp8_mqa_logits),
    TOPK: (plan_topk_v2, topk_transform_paged_v2, topk_transform_ragged_v2),
    INDEXER + "q": (fused_q_indexer_rope_first_quant,),
    INDEXER + "k": (fused_k_indexer_norm_rope_store,),
    CONCAT: (concat_mla_absorb_q, concat_mla_k),
    "sglang.kernels.ops.attention.mla_qk_prep": (concat_and_cast_mha_k_triton,),
    "sglang.kernels.ops.attention.dsa.dequant_k_cache": (dequantize_k_cache_paged_dsa,),
    "sglang.kernels.ops.kvcache.mla_buffer": (set_mla_kv_buffer_triton, get_mla_kv_buffer_triton),
    "sglang.kernels.ops.quantization.dsa_quant_k_cache": (quantize_k_cache_separate,),
}


def noted(module, function):
    @functools.wraps(function)
    def call(*arguments, **options):
        CALLS.append((module, function.__name__, len(arguments), tuple(options)))
        return function(*arguments, **options)

    return function if inspect.isclass(function) else call


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    CALLS.clear()
    for name, functions in STAND_INS.items():
        module = ModuleType(name)
        for function in functions:
            setattr(module, function.__name__, noted(name, function))
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["deep_gemm"].get_num_sms = lambda: 132
    stream = type("Stream", (), {"wait_stream": lambda self, other: None})
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())


def wanted(case: bench_cases.Case) -> bool:
    """Whether the call differs from that of another case: lengths alone change nothing."""
    return "portable" not in case.panel and ("prefill" in case.panel or case.tokens not in (130, 200))


CASES = {case.name: case for case in bench_cases.cases(TINY) if wanted(case)}
# As many heads as the built-in has a kernel of its own for.
CASES |= {case.name: case for case in (bench_cache_cases.expanded_keys(128, 5),)}


@pytest.mark.parametrize("name", CASES)
def test_a_rival_answers_the_question_of_its_case(name):
    case = CASES[name]
    inputs = case.make(Maker(torch.device("cpu"), 1))
    got, want = case.rival.make(inputs)(), case.reference(case.make(Maker(torch.device("cpu"), 1)))
    if case.panel.startswith("index scores"):
        seen = want > -torch.inf
        torch.testing.assert_close(got.double()[seen], want[seen], rtol=1e-5, atol=1e-5)
    elif case.kind == "copies" and isinstance(want, tuple):
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    elif isinstance(want, tuple):
        torch.testing.assert_close(got.double().reshape(want[0].shape), want[0], rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(got, want)
    if case.kind:
        ours = case.ours(inputs, "torch")
        assert bench_agreement.difference(case.kind, ours, got) <= bench_agreement.LIMITS[case.kind]


def test_arguments_are_those_of_the_installed_packages():
    for case in CASES.values():
        case.rival.make(case.make(Maker(torch.device("cpu"), 1)))()
    functions = {(module, f.__name__) for module, all_of in STAND_INS.items() for f in all_of if not inspect.isclass(f)}
    assert {call[:2] for call in CALLS} == functions
    checked = set()
    for module, name, positional, keywords in set(CALLS):
        parameters = _parameters(module, name)
        if parameters is None:
            continue
        checked.add(module)
        (stand_in,) = [f for f in STAND_INS[module] if f.__name__ == name]
        assert [*inspect.signature(stand_in).parameters][:positional] == parameters[:positional], name
        assert set(keywords) <= set(parameters[positional:]), name
    if not checked:
        pytest.skip("none of the kernel packages is installed")


def _parameters(module, name):
    """Names of the parameters in the source of an installed package; None where it is not installed."""
    top = module.split(".")[0]
    spec = _spec(top)
    if spec is None or spec.origin is None:
        return None
    root = Path(spec.origin).parent.parent
    file = root / DEFINED.get(module, module.replace(".", "/") + ".py")
    file = file if file.exists() else root / module.replace(".", "/") / "__init__.py"
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    raise AssertionError(f"{file} has no {name}")


def _spec(top):
    # The stand-in hides the package from find_spec.
    hidden = sys.modules.pop(top, None)
    try:
        return importlib.util.find_spec(top)
    finally:
        if hidden is not None:
            sys.modules[top] = hidden
