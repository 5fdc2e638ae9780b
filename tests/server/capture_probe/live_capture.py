"""Writes calls of a running server's operators to files, one a call: inputs as the operator got them, and its answer.

Only while the file `on` exists, so a server is started and warmed up at full speed. Up to ROWS rows of a call are kept,
spread evenly and with the last, and of the caches only what those rows may read: the picked latent rows, or all index
pages of their requests up to the row's length. Slots and pages are numbered anew accordingly; the original ones are
kept beside them. Tensors are copied to the host, so a call that is being recorded into a CUDA graph cannot be captured:
start the server with --disable-decode-cuda-graph. What runs between the segments of a prefill graph can be.
"""

import functools
import itertools
import os
import pathlib

import torch

ROWS = 8
# Of expanded attention all rows and keys are kept, but few heads.
HEADS = 4
MOST_EXPANDED = 4096
# Scores are computed for all rows of a call, as selection does, up to this many bytes; else for the kept rows alone.
MOST_SCORES = 1 << 29

_where = pathlib.Path(os.environ["DSA_TEST_CAPTURE"])
_serial = itertools.count()
_layer = {"id": -1, "mode": "?"}
_chosen = {}


def hook_backend(module):
    """Wrap DsaBackend, which knows layer and mode, and the operators of attention."""
    from sglang_dsa_plugin import support
    from sglang_dsa_plugin.ops import dense_mha, sparse_mla

    choose = support.choose

    def noting(operator, **asked):
        choice = choose(operator, **asked)
        _chosen[operator] = choice.name
        return choice

    support.choose = noting
    sparse, backend = module.DsaBackend._sparse, module.DsaBackend
    extend = backend.forward_extend

    @functools.wraps(sparse)
    def with_layer(self, q, k, layer, forward_batch, save_kv_cache, **more):
        _layer.update(
            id=layer.layer_id,
            mode="decode" if forward_batch.forward_mode.is_decode() else "prefill",
            picks=more.get("topk_indices"),
            step=self.forward_metadata,
        )
        return sparse(self, q, k, layer, forward_batch, save_kv_cache, **more)

    @functools.wraps(extend)
    def with_layer_too(self, q, k, v, layer, *more, **named):
        _layer.update(id=layer.layer_id, mode="prefill")
        return extend(self, q, k, v, layer, *more, **named)

    backend._sparse, backend.forward_extend = with_layer, with_layer_too
    sparse_mla.sparse_mla = _captured(_with_lse(sparse_mla.sparse_mla), _attend)
    dense_mha.dense_mha = _captured(_with_lse(dense_mha.dense_mha), _dense)


def hook_indexer(module):
    """Wrap DsaIndexer, which knows the layer, and scores with selection."""
    from sglang_dsa_plugin.ops import index_select

    forward, pick = module.DsaIndexer.forward, module.DsaIndexer._store_and_pick

    @functools.wraps(forward)
    def with_mode(self, *arguments, **named):
        batch = named.get("forward_batch", arguments[3] if len(arguments) > 3 else None)
        _layer.update(mode="decode" if batch.forward_mode.is_decode() else "prefill")
        return forward(self, *arguments, **named)

    @functools.wraps(pick)
    def with_layer(self, step, *more, **named):
        _layer.update(id=self.layer_id)
        if step.decision.path == "graph":  # a replay does not call `forward`
            _layer.update(mode="prefill")
        return pick(self, step, *more, **named)

    module.DsaIndexer.forward, module.DsaIndexer._store_and_pick = with_mode, with_layer
    index_select.paged = _captured(index_select.paged, _select)


def _with_lse(attend):
    """Layers do not ask for it; a judge sees a hundredth of the scale in it that the output hides."""

    @functools.wraps(attend)
    def call(*arguments, **named):
        return attend(*arguments, **(named | {"with_lse": True}))

    return call


def _captured(operator, describe):
    @functools.wraps(operator)
    def call(*arguments, **named):
        answer = operator(*arguments, **named)
        recording = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if not recording and (_where / "on").exists():
            found = describe(answer, *arguments, **named)
            if found is not None:
                _write(operator.__name__, found)
        return answer

    return call


def _write(operator, found):
    found = {key: value.detach().cpu() if isinstance(value, torch.Tensor) else value for key, value in found.items()}
    found |= {"operator": operator, "layer": _layer["id"], "mode": _layer["mode"]}
    target = _where / f"{os.getpid()}-{next(_serial):06d}.pt"
    torch.save(found, target.with_suffix(".part"))
    target.with_suffix(".part").rename(target)


def _kept(rows, device):
    return torch.linspace(0, rows - 1, min(rows, ROWS), device=device).round().long().unique()


def _attend(answer, q, kv_rows, slots, scale, layout, kv_scale=1.0, sink=None, lengths=None, q_rope=None, **_):
    keep = _kept(q.shape[0], q.device)
    slots = slots[keep]
    valid = (slots >= 0) & (slots < kv_rows.shape[0])
    cached = slots[valid].long().unique()
    step, picks = _layer["step"], _layer["picks"][keep]
    return {
        "implementation": _chosen.get("sparse_mla"),
        "rows": q.shape[0],
        "q": q[keep] if q_rope is None else torch.cat((q[keep], q_rope[keep]), dim=-1),
        "kv_rows": kv_rows.view(torch.uint8)[cached].view(kv_rows.dtype),
        "slots": torch.where(valid, torch.searchsorted(cached, slots.long()), -1).int(),
        "pool_slots": slots,
        "picks": picks,
        "page_table": step.page_table[step.row_to_request[keep].long()],
        "lengths": None if lengths is None else lengths[keep],
        "seen": step.lengths[keep],
        "scale": scale,
        "layout": layout,
        "kv_scale": kv_scale,
        "sink": sink,
        "out": answer[0][keep],
        "lse": answer[1][keep],
    }


def _select(picks, q, pages, gate, lengths, page_table, row_to_request, topk, init_tokens=0, local_tokens=0, **more):
    from sglang_dsa_plugin import support
    from sglang_dsa_plugin.ops import index_scores

    keep = _kept(q.shape[0], q.device)
    width = int(lengths.max())
    chosen = _chosen.get("index_select_paged")
    by = chosen if any(row.name == chosen for row in support.rows("index_scores_paged")) else None
    if 4 * q.shape[0] * width <= MOST_SCORES:
        scores = index_scores.paged(q, pages, gate, lengths, page_table, row_to_request, width, impl=by)[keep]
    else:
        few = (q[keep], pages, gate[keep], lengths[keep], page_table, row_to_request[keep])
        scores = index_scores.paged(*few, width, impl=by)
    # A page table of its own for each row, of as many pages as the longest row fills.
    table = page_table[row_to_request[keep].long()][:, : max(1, -(-int(lengths[keep].max()) // 64))]
    column = torch.arange(table.shape[1], device=q.device)
    used = column < (lengths[keep, None] + 63) // 64
    taken = table[used].long().unique()
    return {
        "implementation": chosen,
        "rows": q.shape[0],
        "q": q[keep],
        "pages": pages[taken],
        "gate": gate[keep],
        "lengths": lengths[keep],
        "page_table": torch.where(used, torch.searchsorted(taken, table.long()), 0).int(),
        "row_to_request": torch.arange(len(keep), dtype=torch.int32),
        "topk": topk,
        "init_tokens": init_tokens,
        "local_tokens": local_tokens,
        "scores": scores,
        "picks": picks[keep],
    }


def _dense(answer, q, k, v, cu_q, cu_k, scale, **_):
    if max(q.shape[0], k.shape[0]) > MOST_EXPANDED:
        return None
    heads = torch.linspace(0, q.shape[1] - 1, min(q.shape[1], HEADS), device=q.device).round().long().unique()
    return {
        "implementation": _chosen.get("dense_mha"),
        "rows": q.shape[0],
        "q": q[:, heads],
        "k": k[:, heads],
        "v": v[:, heads],
        "cu_q": cu_q,
        "cu_k": cu_k,
        "scale": scale,
        "out": answer[0][:, heads],
        "lse": answer[1][:, heads],
    }
