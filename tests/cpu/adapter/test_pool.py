"""SGLang's pool with our rows: shapes, bytes, and that latents and index keys always travel together."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

from sglang_dsa_plugin import plan
from sglang_dsa_plugin.adapter import state
from sglang_dsa_plugin.adapter.pool import DsaPool
from sglang_dsa_plugin.cache.layouts import FP8, LATENT_LAYOUTS, index_token_bytes
from sglang_dsa_plugin.ops import quant

LAYOUTS = {"bf16_1152": torch.bfloat16, "fp32_2304": torch.float32, "fp8_656": FP8, "fp8_576": FP8}
TOKENS, LAYERS = 256, 3
LAYER = SimpleNamespace(layer_id=1)


@pytest.fixture(autouse=True)
def one_process_one_model(monkeypatch):
    from sglang.srt.runtime_context import get_parallel

    monkeypatch.setattr(state, "_model_dtype", None)
    with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0, attn_tp_size=1):
        yield


def make_pool(layout: str, model: torch.dtype = torch.bfloat16, **kwargs) -> DsaPool:
    state.set_model_dtype(model)
    return DsaPool(
        TOKENS,
        page_size=kwargs.pop("page_size", 64),
        dtype=LAYOUTS[layout],
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        layer_num=LAYERS,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=LATENT_LAYOUTS[layout].width,
        start_layer=0,
        end_layer=LAYERS - 1,
        skip_topk_layers=[False, True, False],
        **kwargs,
    )


def tokens(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 512, generator=generator), torch.randn(count, 1, 64, generator=generator)


def expected_row(nope: torch.Tensor, rope: torch.Tensor, layout: str) -> torch.Tensor:
    rows = quant.quantize_latent(nope.view(-1, 512), rope.view(-1, 64), layout)
    return quant.dequantize_latent(rows, layout)


def test_it_is_the_type_sglang_tests_for():
    assert issubclass(DsaPool, DSATokenToKVPool)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", [torch.bfloat16, torch.float32])
def test_bytes_allocated_equal_bytes_planned(layout, model):
    pool = make_pool(layout, model)
    keys = index_token_bytes(plan.index_key_dtype(model))
    rows = (TOKENS + 64) * LAYERS * LATENT_LAYOUTS[layout].row_bytes
    index = (TOKENS + 64) * 2 * keys
    assert pool.get_kv_size_bytes() == rows + index
    assert pool.layout.name == layout


@pytest.mark.parametrize("layout", LAYOUTS)
def test_store_and_read_back(layout):
    pool = make_pool(layout)
    nope, rope = tokens(5)
    slots = torch.tensor([64, 65, 130, 319, 70])
    pool.set_mla_kv_buffer(LAYER, slots, nope, rope)
    got_nope, got_rope = pool.get_mla_kv_buffer(LAYER, slots, torch.float32)
    want = expected_row(nope, rope, layout)
    assert torch.equal(torch.cat([got_nope, got_rope], dim=-1).view(5, 576), want)
    assert got_nope.shape == (5, 1, 512) and got_rope.shape == (5, 1, 64)
    untouched, _ = pool.get_mla_kv_buffer(LAYER, torch.tensor([66, 131]), torch.float32)
    assert not untouched.any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_combined_door_writes_the_same_row(layout):
    pool = make_pool(layout)
    nope, rope = tokens(2, seed=1)
    pool.set_kv_buffer(LAYER, torch.tensor([100, 7]), torch.cat([nope, rope], dim=-1), None)
    got = torch.cat(pool.get_mla_kv_buffer(LAYER, torch.tensor([100, 7]), torch.float32), dim=-1)
    assert torch.equal(got.view(2, 576), expected_row(nope, rope, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_move_takes_latents_and_index_keys_together(layout):
    pool = make_pool(layout)
    nope, rope = tokens(64)
    slots = torch.arange(64, 128)
    for layer in range(LAYERS):
        pool.set_mla_kv_buffer(SimpleNamespace(layer_id=layer), slots, nope + layer, rope)
    keys, scales = quant.quantize_keys(torch.randn(64, 128))
    for layer in (0, 2):
        pool.index_pages.store(layer, slots, keys, scales)
    pool.move_kv_cache(torch.tensor([130]), torch.tensor([70]))
    for layer in range(LAYERS):
        moved, source = (pool.get_mla_kv_buffer(SimpleNamespace(layer_id=layer), torch.tensor([s])) for s in (130, 70))
        assert torch.equal(moved[0], source[0]) and moved[0].any()
    for layer in (0, 2):
        key, scale = pool.index_pages.load(layer, torch.tensor([130]))
        assert torch.equal(key.view(torch.uint8), keys[6:7].view(torch.uint8)) and torch.equal(scale, scales[6:7])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_retraction_restores_every_byte_at_other_slots(layout):
    pool = make_pool(layout)
    source, target = torch.arange(64, 164), torch.arange(192, 292)
    nope, rope = tokens(100)
    keys, scales = quant.quantize_keys(torch.randn(100, 128))
    for layer in range(LAYERS):
        pool.set_mla_kv_buffer(SimpleNamespace(layer_id=layer), source, nope, rope)
    for layer in (0, 2):
        pool.index_pages.store(layer, source, keys, scales)
    before = [buffer[source].clone() for buffer in pool.kv_buffer]
    host = pool.get_cpu_copy(source)
    for buffer in pool.kv_buffer + pool.index_pages.buffer:
        buffer.zero_()
    pool.load_cpu_copy(host, target)
    assert all(torch.equal(buffer[target], rows) for buffer, rows in zip(pool.kv_buffer, before))
    for layer in (0, 2):
        key, scale = pool.index_pages.load(layer, target)
        assert torch.equal(key.view(torch.uint8), keys.view(torch.uint8)) and torch.equal(scale, scales)


def test_transfer_lists_cover_every_byte():
    # A transfer engine that is not given the index buffers answers wrongly on cache hits only.
    pool = make_pool("fp8_656")
    _, lengths, _ = pool.get_contiguous_buf_infos()
    _, state_lengths, items = pool.get_state_buf_infos()
    assert sum(lengths) + sum(state_lengths) == pool.get_kv_size_bytes()
    assert items == [8448, 0, 8448]


def test_another_page_size_is_refused_by_its_flag():
    with pytest.raises(ValueError, match="page_size must be 64, got 128; leave --page-size out"):
        make_pool("bf16_1152", page_size=128)


def test_an_unknown_row_width_is_refused():
    with pytest.raises(ValueError, match=r"no row layout has 576 elements of torch\.float16"):
        from sglang_dsa_plugin.adapter.pool import _layout_of

        _layout_of(torch.float16, 576)


def test_one_process_serves_one_dtype():
    state.set_model_dtype(torch.float32)
    with pytest.raises(RuntimeError, match=r"already serves a model in torch.float32"):
        state.set_model_dtype(torch.bfloat16)
