"""Small problems for `sglang-dsa check`: per operator the inputs, the fp64 answer, and how an answer is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from sglang_dsa_plugin.cache.layouts import FP8, INDEX_PAGE_BYTES, LATENT_LAYOUTS, PAGE_SIZE, ROPE_DIM
from sglang_dsa_plugin.ops import (
    dense_mha,
    hadamard,
    index_front,
    index_keys,
    index_queries,
    index_scores,
    index_select,
    key_pages,
    latent_rows,
    masked_mha,
    mha_keys,
    quant,
    rope,
    select,
    sparse_mla,
)
from sglang_dsa_plugin.tools.check_judges import Case, Tensors, attention, close, equal, rounded_attention, spread_of

BF16 = torch.bfloat16
KV_SCALE = 0.02
SCALE = 192**-0.5


def cases() -> Iterator[Case]:
    """All problems, operators in the order of the support table's documentation."""
    g = torch.Generator().manual_seed(20)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=g, dtype=torch.int32)

    def on(device: torch.device, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
        return [None if t is None else t.to(device) for t in tensors]

    yield from _rows_and_keys(normal, integers, on)
    yield from _indexer(normal, integers, on)
    yield from _attention(normal, integers, on)


def _rows_and_keys(normal: Callable, integers: Callable, on: Callable) -> Iterator[Case]:
    keys = normal(77, 128, dtype=BF16)
    yield Case(
        "quantize_keys", "77 keys", {}, lambda d, i: quant.quantize_keys(*on(d, keys), impl=i),
        quant.reference_quantize_keys(keys), equal,
    )  # fmt: skip
    x = normal(33, 4, 128)
    yield Case(
        "hadamard", "f32 [33, 4, 128]", {}, lambda d, i: (hadamard.rotate(*on(d, x), impl=i),),
        (hadamard.reference(x),), close(2e-6),
    )  # fmt: skip
    cos_sin, positions = torch.cat([normal(300, 32).cos(), normal(300, 32).sin()], dim=1), integers(0, 300, 33).long()
    for layout in ("half", "interleaved"):
        turn = normal(33, 4, ROPE_DIM)
        yield Case(
            "rope", layout, {}, lambda d, i, t=turn, y=layout: (rope.apply(*on(d, t, positions, cos_sin), y, impl=i),),
            (rope.reference(turn, positions, cos_sin, layout),), close(2e-6),
        )  # fmt: skip
    latent, turned, slots = normal(70, 512, dtype=BF16), normal(70, 64, dtype=BF16), torch.randperm(256)[:70].int()
    slots[5] = -1
    for layout, spec in LATENT_LAYOUTS.items():
        scale = KV_SCALE if layout == "fp8_576" else 1.0
        rows = quant.reference_quantize_latent(latent, turned, layout, scale)

        def stored(d: torch.device, i: str, y: str = layout, s: float = scale) -> Tensors:
            spec = LATENT_LAYOUTS[y]
            out = torch.zeros(256, spec.width, dtype=spec.dtype, device=d)
            latent_rows.store(out, *on(d, slots, latent, turned), y, s, impl=i)
            return (out.view(torch.uint8),)

        blank = torch.zeros(256, spec.width, dtype=spec.dtype)
        latent_rows.reference_store(blank, slots, latent, turned, layout, scale)
        features: dict[str, object] = {"layout": layout}
        yield Case("latent_rows_store", layout, features, stored, (blank.view(torch.uint8),), equal)
        yield Case(
            "quantize_latent", layout, features,
            lambda d, i, y=layout, s=scale: (
                quant.quantize_latent(*on(d, latent, turned), y, s, impl=i).view(torch.uint8),
            ),
            (rows.view(torch.uint8),), equal,
        )  # fmt: skip
        yield Case(
            "dequantize_latent", layout, features,
            lambda d, i, r=rows, y=layout, s=scale: (quant.dequantize_latent(*on(d, r), y, s, impl=i),),
            (quant.reference_dequantize_latent(rows, layout, scale),), close(1e-6),
        )  # fmt: skip
        yield Case(
            "latent_rows_load", layout, features,
            lambda d, i, b=blank, y=layout, s=scale: (latent_rows.load(*on(d, b, slots), y, s, impl=i),),
            (latent_rows.reference_load(blank, slots, layout, scale),), close(1e-6),
        )  # fmt: skip
        yield Case(
            "latent_rows_load", f"{layout}, two parts in bf16", features,
            lambda d, i, b=blank, y=layout, s=scale: latent_rows.load_parts(*on(d, b, slots), y, BF16, s, impl=i),
            latent_rows.reference_load(blank, slots, layout, scale).bfloat16().split([512, 64], dim=1), equal,
        )  # fmt: skip
        yield _moved("latent_rows_move", layout, blank, latent_rows.move, latent_rows.reference_move)
    yield from _key_pages(normal, on)


def _key_pages(normal: Callable, on: Callable) -> Iterator[Case]:
    keys, scales = quant.reference_quantize_keys(normal(100, 128))
    keys, scales, slots = keys.to(FP8), scales.float(), torch.randperm(4 * PAGE_SIZE)[:100].int()
    slots[7] = -1
    for label, k, scale in (("fp8", keys, scales), ("bf16", normal(100, 128, dtype=BF16), None)):
        blank = torch.zeros(4, INDEX_PAGE_BYTES, dtype=torch.uint8)
        blank = blank if scale is not None else torch.zeros(4, PAGE_SIZE, 128, dtype=BF16)
        full = blank.clone()
        key_pages.reference_store(full, slots, k, scale)

        def stored(
            d: torch.device, i: str, to: torch.Tensor = blank, k: torch.Tensor = k, scale: torch.Tensor | None = scale
        ) -> Tensors:
            pages = to.clone().to(d)
            key_pages.store(pages, *on(d, slots, k, scale), impl=i)
            return (pages,)

        yield Case("key_pages_store", label, {}, stored, (full,), equal)
        yield Case(
            "key_pages_load", label, {}, lambda d, i, p=full: key_pages.load(*on(d, p, slots), impl=i),
            key_pages.reference_load(full, slots), equal,
        )  # fmt: skip
        yield _moved("key_pages_move", label, full, key_pages.move, key_pages.reference_move)


def _moved(operator: str, label: str, before: torch.Tensor, move: Callable, reference: Callable) -> Case:
    """Twenty tokens to places that are in part where others of them come from."""
    source, target = torch.arange(20, dtype=torch.int32), torch.arange(10, 30, dtype=torch.int32)
    after = before.clone()
    reference(after, source, target)

    def run(d: torch.device, i: str) -> Tensors:
        moved = before.clone().to(d)
        move(moved, source.to(d), target.to(d), impl=i)
        return (moved.view(torch.uint8),)

    return Case(operator, label, {}, run, (after.view(torch.uint8),), equal)


def _indexer(normal: Callable, integers: Callable, on: Callable) -> Iterator[Case]:
    cos_sin, positions = torch.cat([normal(300, 32).cos(), normal(300, 32).sin()], dim=1), integers(0, 300, 40).long()
    slots = torch.randperm(4 * PAGE_SIZE)[:40].int()
    weight, bias, projected = normal(128) + 1, normal(128), normal(40, 128, dtype=BF16)
    want = index_keys.reference_keys(projected, weight, bias, 1e-6, positions, cos_sin, "half", True)

    def stored(d: torch.device, i: str) -> Tensors:
        pages = torch.zeros(4, INDEX_PAGE_BYTES, dtype=torch.uint8, device=d)
        index_keys.store(
            pages, *on(d, slots, projected, weight, bias), 1e-6, *on(d, positions, cos_sin), "half", impl=i
        )
        keys, scales = key_pages.load(pages, slots.to(d), impl="torch")
        return (keys.float() * scales.unsqueeze(1),)

    # An e4m3 step is 1/8 of a power of two at most, of a row whose largest value is below 448 * scale.
    yield Case("index_keys_store", "fp8, half", {}, stored, (want,), close(1 / 16))
    q, gate = normal(40, 32 * 128, dtype=BF16), normal(40, 32)

    def prepared(d: torch.device, i: str) -> Tensors:
        values, folded = index_queries.prepare(*on(d, q, gate, positions, cos_sin), "half", FP8, impl=i)
        return (values.float() * (folded / (gate.to(d) * (32 * 128) ** -0.5)).unsqueeze(2),)

    turned = index_queries.reference_queries(q, positions, cos_sin, "half", True)
    yield Case("index_queries", "fp8, half, 32 heads", {"heads": 32}, prepared, (turned,), close(1 / 16))

    def both(d: torch.device, i: str) -> Tensors:
        pages = torch.zeros(4, INDEX_PAGE_BYTES, dtype=torch.uint8, device=d)
        keys = (*on(d, slots, projected, weight, bias), 1e-6)
        seen = torch.full((40,), 100, dtype=torch.int32, device=d)
        rest = (*on(d, q, gate, positions, cos_sin), "half", seen, 64)
        values, folded = index_front.store_and_prepare(pages, *keys, *rest, impl=i)
        stored_keys, scales = key_pages.load(pages, slots.to(d), impl="torch")
        queries = values.float() * (folded / (gate.to(d) * (32 * 128) ** -0.5)).unsqueeze(2)
        return stored_keys.float() * scales.unsqueeze(1), queries

    yield Case("index_front", "fp8, half, 32 heads", {"heads": 32}, both, (want, turned), close(1 / 16))
    for heads, rows, count in ((64, 9, 700), (32, 3, 130), (16, 33, 65)):
        yield from _scoring(heads, rows, count, integers, on)


def _scoring(heads: int, rows: int, count: int, integers: Callable, on: Callable) -> Iterator[Case]:
    # Small integers: every score is exact in f32, so picks are compared bit for bit.
    q, k = integers(-3, 4, rows, heads, 128).float().to(FP8), integers(-3, 4, count, 128).float().to(FP8)
    scale, gate = 2.0 ** integers(-2, 2, count).float(), integers(-4, 5, rows, heads).float()
    start = integers(0, count // 4, rows)
    end = torch.minimum(start + integers(0, count, rows), torch.tensor(count, dtype=torch.int32))
    label, features = f"{rows} rows, {count} keys, {heads} heads", {"heads": heads}
    arguments = (q, k, scale, gate, start, end)
    scores = index_scores.reference_ragged(*arguments, count)
    topk = 64
    yield Case(
        "index_scores_ragged", label, features,
        lambda d, i: (index_scores.ragged(*on(d, *arguments), count, impl=i),), (scores,), close(1e-6, 1e-6),
    )  # fmt: skip
    yield Case(
        "index_select_ragged", label, {**features, "k": topk},
        lambda d, i: (index_select.ragged(*on(d, *arguments), topk, impl=i),),
        (index_select.reference_ragged(*arguments, topk),), equal,
    )  # fmt: skip
    pages = -(-count // PAGE_SIZE)
    table = torch.randperm(2 * pages).view(2, pages).int()
    store, owner = torch.zeros(2 * pages, INDEX_PAGE_BYTES, dtype=torch.uint8), integers(0, 2, rows)
    for request in range(2):
        at = table[request].repeat_interleave(PAGE_SIZE)[:count] * PAGE_SIZE + torch.arange(count) % PAGE_SIZE
        key_pages.reference_store(store, at, k, scale)
    lengths = integers(0, count + 1, rows)
    paged = (q, store, gate, lengths, table, owner)
    yield Case(
        "index_scores_paged", label, features, lambda d, i: (index_scores.paged(*on(d, *paged), count, impl=i),),
        (index_scores.reference_paged(*paged, count),), close(1e-6, 1e-6),
    )  # fmt: skip
    picks = index_select.reference_paged(*paged, topk)
    yield Case(
        "index_select_paged", label, {**features, "k": topk},
        lambda d, i: (index_select.paged(*on(d, *paged), topk, impl=i),), (picks,), equal,
    )  # fmt: skip
    yield Case(
        "positions_to_slots", label, {}, lambda d, i: (select.positions_to_slots(*on(d, picks, table, owner), impl=i),),
        (select.reference_slots(picks, table, owner),), equal,
    )  # fmt: skip
    # Few different values: most picks are decided by the tie rule.
    ties, sizes = integers(0, 5, rows, count).float(), integers(0, count + 1, rows)
    yield Case(
        "topk", f"{label}, ties", {"k": topk}, lambda d, i: (select.topk(*on(d, ties, sizes), topk, impl=i),),
        (picked := select.reference(ties, sizes, topk),), equal,
    )  # fmt: skip
    offsets = integers(0, 1000, rows)
    yield Case(
        "topk_ragged", f"{label}, ties", {"k": topk},
        lambda d, i: (select.topk_ragged(*on(d, ties, sizes), topk, offsets.to(d), impl=i),),
        (torch.where(picked >= 0, picked + offsets[:, None], -1),), equal,
    )  # fmt: skip
    yield Case(
        "topk_slots", f"{label}, ties", {"k": topk},
        lambda d, i: (select.topk_slots(*on(d, ties, sizes), topk, *on(d, table, owner), impl=i),),
        (select.reference_slots(picked, table, owner),), equal,
    )  # fmt: skip


def _attention(normal: Callable, integers: Callable, on: Callable) -> Iterator[Case]:
    latent, turned = normal(500, 512), normal(500, 64)
    for layout in LATENT_LAYOUTS:
        scale = KV_SCALE if layout == "fp8_576" else 1.0
        dtype = torch.float32 if layout == "fp32_2304" else BF16
        rows = quant.reference_quantize_latent(latent, turned, layout, scale)
        for heads in (8, 16, 64, 128):
            q, slots = normal(5, heads, 576, dtype=dtype), integers(0, 500, 5, 192)
            slots[0, 3:40], slots[1], slots[2, 1:] = -1, -1, -1
            want = sparse_mla.reference(q, rows, slots, SCALE, layout, scale)
            yield Case(
                "sparse_mla", f"{layout}, {heads} heads",
                {"layout": layout, "heads": heads, "k": 192, "dtype": dtype},
                lambda d, i, q=q, r=rows, s=slots, y=layout, z=scale: sparse_mla.sparse_mla(
                    *on(d, q, r, s), SCALE, y, z, impl=i
                ),
                (*want, spread_of(q, rows, slots, SCALE, layout, scale)), attention, rounded_attention,
            )  # fmt: skip
    cu_q, cu_k = torch.tensor([0, 5, 6, 70], dtype=torch.int32), torch.tensor([0, 5, 90, 160], dtype=torch.int32)
    for heads, width, out in ((16, 192, 128), (8, 256, 256)):
        own, shared = normal(160, heads, width - 64 + out, dtype=BF16)[..., : width - 64], normal(160, 64, dtype=BF16)
        yield Case(
            "mha_keys", f"{heads} heads of {width}", {"heads": heads, "dtype": BF16},
            lambda d, i, a=(own, shared): (mha_keys.join(*on(d, *a), impl=i),),
            (mha_keys.reference(own, shared),), equal,
        )  # fmt: skip
        q, k, v = normal(70, heads, width, dtype=BF16), normal(160, heads, width, dtype=BF16), normal(160, heads, out)
        v = v.to(BF16)
        want = dense_mha.reference(q, k, v, cu_q, cu_k, SCALE)
        spread, _ = dense_mha.reference(q, k, v.abs(), cu_q, cu_k, SCALE)
        yield Case(
            "dense_mha", f"{heads} heads of {width} and {out}", {"heads": heads, "dtype": BF16},
            lambda d, i, a=(q, k, v, cu_q, cu_k): dense_mha.dense_mha(*on(d, *a), SCALE, impl=i),
            (*want, spread), attention, rounded_attention,
        )  # fmt: skip
        picks = torch.full((70, 48), -1, dtype=torch.int32)
        seen = torch.cat([torch.arange(5), torch.tensor([84]), torch.arange(6, 70)]) + 1
        for row, length in enumerate(seen.tolist()):
            picked = torch.randperm(length)[:48].sort().values
            picks[row, : len(picked)] = picked.int()
        yield Case(
            "masked_mha", f"{heads} heads of {width} and {out}", {"heads": heads, "dtype": BF16},
            lambda d, i, a=(q, k, v, picks, cu_q, cu_k): masked_mha.masked_mha(*on(d, *a), SCALE, impl=i),
            masked_mha.reference(q, k, v, picks, cu_q, cu_k, SCALE), attention,
        )  # fmt: skip
