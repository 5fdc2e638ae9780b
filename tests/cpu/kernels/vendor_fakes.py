"""Stand-ins for kernel packages: each checks what the real kernel needs and answers in float64.

They hold what the packages document, so that the adapters' conversions can be tested without a GPU; that the real
kernels do as documented is for tests/gpu/test_vendor.py.
"""

import math
import sys
import types

import torch

from sglang_dsa_plugin.cache.layouts import FP8
from sglang_dsa_plugin.ops import dense_mha, index_scores, quant

PROCESSORS = 4


def attend(q, rows, scale):
    """q [H, D] over rows [n, D]: (out [H, 512], lse [H]) natural log."""
    scores = scale * (q.double() @ rows.double().T)
    return torch.softmax(scores, dim=1) @ rows[:, :512].double(), torch.logsumexp(scores, dim=1)


def flash_mla(calls):
    """calls: collects the schedules it was handed."""

    def with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, schedule, softmax_scale, is_fp8_kvcache, indices, attn_sink,
        use_legacy,
    ):  # fmt: skip
        rows, one, heads, dim = q.shape
        assert (one, dim, head_dim_v) == (1, 576, 512) and heads in (64, 128) and q.is_contiguous()
        assert k_cache.dtype == torch.uint8 and k_cache.shape[1:] == (64, 1, 656) and is_fp8_kvcache and use_legacy
        assert indices.dtype == torch.int32 and indices.shape[:2] == (rows, 1) and indices.shape[2] % 64 == 0
        assert indices.is_contiguous() and (attn_sink is None or attn_sink.shape == (heads,))
        cached = k_cache.shape[0] * 64
        assert ((indices == -1) | ((indices >= 0) & (indices < cached))).all()
        calls.append((schedule, tuple(indices.shape), heads))
        latents = quant.dequantize_latent(k_cache.reshape(cached, 656), "fp8_656", impl="torch")
        out, lse = torch.zeros(rows, 1, heads, 512), torch.full((rows, heads, 1), math.inf)
        for r in range(rows):
            picked = latents[indices[r, 0][indices[r, 0] >= 0].long()]
            if len(picked):
                out[r, 0], lse[r, :, 0] = attend(q[r, 0], picked, softmax_scale)
        if attn_sink is not None:
            out *= torch.sigmoid(lse[:, :, 0] - attn_sink)[:, None, :, None]
        return out.bfloat16(), lse

    def sparse_fwd(q, kv, indices, sm_scale, attn_sink, topk_length, use_legacy, return_log2_lse):
        rows, heads, dim = q.shape
        assert heads in (64, 128) and dim == 576 and q.is_contiguous() and q.dtype == kv.dtype == torch.bfloat16
        assert kv.shape[1:] == (1, 576) and use_legacy
        assert indices.dtype == torch.int32 and indices.shape[:2] == (rows, 1) and indices.shape[2] % 128 == 0
        assert indices.is_contiguous() and (attn_sink is None or attn_sink.shape == (heads,))
        assert topk_length is None or (topk_length.dtype == torch.int32 and topk_length.shape == (rows,))
        out, lse = torch.zeros(rows, heads, 512), torch.full((rows, heads), math.inf)
        for r in range(rows):
            picked = indices[r, 0].long()
            if topk_length is not None:
                assert (picked[topk_length[r] :] == -1).all(), "it may read them"
                picked = picked[: topk_length[r]]
            picked = picked[(picked >= 0) & (picked < len(kv))]
            if len(picked):
                out[r], lse[r] = attend(q[r], kv[picked, 0], sm_scale)
        if attn_sink is not None:
            out *= torch.sigmoid(lse - attn_sink).unsqueeze(2)
        assert return_log2_lse in (None, False)
        return out.bfloat16(), None, lse if return_log2_lse is None else None

    module = types.ModuleType("flash_mla")
    module.flash_mla_with_kvcache = with_kvcache
    module.flash_mla_sparse_fwd = sparse_fwd
    module.get_mla_metadata = lambda: (object(), None)
    return {"flash_mla": module}


def sgl_kernel(without_keys=math.inf, schedules=None):
    """without_keys: the lse of a query that sees none. schedules: collects those handed over, "made" where one is."""
    schedules = [] if schedules is None else schedules

    def varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, return_softmax_lse
    ):
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and causal
        assert max_seqlen_q >= cu_seqlens_q.diff().max() and max_seqlen_k >= cu_seqlens_k.diff().max()
        out, lse = dense_mha.reference(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale)
        if not return_softmax_lse:
            return out.to(q.dtype)
        return out.to(q.dtype), lse.float().T.contiguous().nan_to_num(neginf=without_keys), None

    def with_kvcache(
        q, k_cache, v_cache, qv, page_table, cache_seqlens, softmax_scale, causal, return_softmax_lse, out,
        scheduler_metadata=None,
    ):  # fmt: skip
        schedules.append(scheduler_metadata)
        rows, _, heads, _ = q.shape
        for part, width in ((q, 64), (qv, 512)):
            assert part.shape == (rows, 1, heads, width) and part.stride(3) == 1 and part.data_ptr() % 16 == 0
            assert all(part.stride(i) % 8 == 0 for i in range(3))
        assert k_cache.shape[1:] == (1, 1, 64) and v_cache.shape[1:] == (1, 1, 512) and k_cache.stride(-1) == 1
        assert k_cache.data_ptr() == v_cache.data_ptr() + 2 * 512, "views of the same rows, no copies"
        assert page_table.dtype == cache_seqlens.dtype == torch.int32 and page_table.stride(1) == 1
        assert return_softmax_lse and causal
        assert (cache_seqlens >= 0).all() and (cache_seqlens <= page_table.shape[1]).all()
        out = torch.empty(rows, 1, heads, 512, dtype=q.dtype) if out is None else out
        assert out.shape == (rows, 1, heads, 512) and out.is_contiguous() and out.dtype == q.dtype
        lse = torch.full((rows, heads, 1), without_keys)
        out.zero_()
        for r in range(rows):
            picked = page_table[r, : cache_seqlens[r]].long()
            assert ((picked >= 0) & (picked < k_cache.shape[0])).all()
            if len(picked):
                whole = torch.cat([v_cache[picked, 0, 0], k_cache[picked, 0, 0]], dim=1)
                found, norm = attend(torch.cat([qv[r, 0], q[r, 0]], dim=1), whole, softmax_scale)
                out[r, 0], lse[r, :, 0] = found.to(q.dtype), norm.float()
        return out, lse, None

    def metadata(cache_seqlens, batch_size, max_seqlen_k, **more):
        assert (cache_seqlens == max_seqlen_k).all() and cache_seqlens.shape == (batch_size,)
        sizes = {"max_seqlen_q": 1, "num_heads_k": 1, "headdim": 64, "headdim_v": 512, "page_size": 1, "causal": True}
        assert more.pop("num_heads") and more.pop("qkv_dtype") == torch.bfloat16 and more == sizes
        schedules.append("made")
        return torch.zeros(1)

    package, attention = types.ModuleType("sgl_kernel"), types.ModuleType("sgl_kernel.flash_attn")
    attention.get_scheduler_metadata = metadata
    attention.flash_attn_with_kvcache = with_kvcache
    attention.flash_attn_varlen_func = varlen
    package.flash_attn = attention
    return {"sgl_kernel": package, "sgl_kernel.flash_attn": attention}


def flashinfer():
    def decode(
        query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
        max_seq_len, sparse_mla_top_k, out, bmm1_scale, bmm2_scale, backend, lse, return_lse, return_lse_base,
    ):  # fmt: skip
        rows, one, _, dim = query.shape
        assert (one, dim, kv_lora_rank, qk_rope_head_dim) == (1, 576, 512, 64) and query.dtype == kv_cache.dtype
        assert kv_cache.shape[1:] == (1, 64, 576) and (backend, return_lse_base) == ("trtllm-gen", "basee")
        assert workspace_buffer.dtype == torch.uint8 and not workspace_buffer.any()
        assert sparse_mla_top_k % 4 == 0 and block_tables.shape == (rows, 1, sparse_mla_top_k)
        assert (seq_lens >= 1).all() and return_lse
        cached = kv_cache.reshape(-1, 576).float()
        for r in range(rows):
            picked = block_tables[r, 0, : seq_lens[r]]
            assert (picked >= 0).all() and (block_tables[r, 0, seq_lens[r] :] == -1).all()
            found, norm = attend(query[r, 0].float(), cached[picked.long()], bmm1_scale)
            out[r, 0], lse[r] = (found * bmm2_scale).to(out.dtype), norm.float()
        return out, lse

    package, attention = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.decode")
    attention.trtllm_batch_decode_with_kv_cache_mla = decode
    package.decode = attention
    return {"flashinfer": package, "flashinfer.decode": attention}


def deep_gemm(most_rows, calls=None, plans=None):
    """most_rows: rows a paged call takes. calls: collects rows and columns of calls. plans: collects the lengths that
    schedules are made of.
    """
    calls = [] if calls is None else calls
    plans = [] if plans is None else plans

    def junk(*shape):
        return torch.full(shape, math.nan)

    def mqa(q, kv, weights, ks, ke, clean_logits, max_seqlen_k=0):
        k, scale = kv
        rows, keys = len(q), len(k)
        assert q.dtype == k.dtype == FP8 and q.shape[1] in (32, 64) and q.is_contiguous() and weights.is_contiguous()
        assert ks.dtype == ke.dtype == torch.int32 and not clean_logits
        assert (ke > ks).all() and (ks >= 0).all() and (ke <= keys).all()
        calls.append((rows, max_seqlen_k or keys))
        if max_seqlen_k:
            assert (ke - ks <= max_seqlen_k).all()
            want = index_scores.reference_ragged(q, k, scale, weights, ks, ke, max_seqlen_k).float()
            inside = torch.arange(max_seqlen_k) < (ke - ks).unsqueeze(1)
            found = junk(-(-rows // 4) * 4, -(-max_seqlen_k // 256) * 256)[:rows, :max_seqlen_k]
            return found.copy_(torch.where(inside, want, found))
        # A column a key; neighbours' windows are written over one another's junk, here by other junk.
        want = index_scores.reference_ragged(q, k, scale, weights, ks * 0, ks * 0 + keys).float()
        place = torch.arange(keys)
        inside = (place >= ks.unsqueeze(1)) & (place < ke.unsqueeze(1))
        found = junk(-(-rows // 4) * 4, -(-(keys + 256) // 256) * 256)[:rows, :keys]
        return found.copy_(torch.where(inside, want, found))

    def metadata(lengths, page, processors):
        assert lengths.dtype == torch.int32 and lengths.shape[1] == 1 and (lengths >= 1).all() and page == 64
        assert len(lengths) <= most_rows and processors == PROCESSORS
        plans.append(lengths.clone())
        return torch.cat((lengths.flatten(), torch.ones(2, dtype=torch.int32)))

    def paged(q, cache, weights, lengths, table, schedule, longest, clean_logits):
        rows, one, heads, _ = q.shape
        assert one == 1 and heads in (32, 64) and rows <= most_rows
        assert cache.shape[1:] == (64, 1, 132) and table.dtype == torch.int32 and table.shape[0] == rows
        assert (lengths <= longest).all() and longest == 64 * table.shape[1] and not clean_logits
        read = torch.arange(table.shape[1]) < -(-lengths // 64)
        assert ((table >= 0) & (table < len(cache)))[read].all()
        found = junk(rows, -(-longest // 256) * 256)[:, :longest]
        calls.append((rows, longest))
        if not schedule.any():  # no share for any processor
            return found
        assert torch.equal(schedule[:-2], lengths.flatten())
        want = index_scores.reference_paged(
            q[:, 0], cache.reshape(len(cache), -1), weights, lengths[:, 0], table, torch.arange(rows), longest
        ).float()
        return found.copy_(torch.where(torch.arange(longest) < lengths, want, found))

    module = types.ModuleType("deep_gemm")
    module.fp8_mqa_logits, module.fp8_paged_mqa_logits = mqa, paged
    module.get_paged_mqa_logits_metadata, module.get_num_sms = metadata, lambda: PROCESSORS
    return {"deep_gemm": module}


def install(monkeypatch, modules):
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
