"""Random inputs of the kernel benchmark, made on the device that measures, in the form in which a server holds them."""

from __future__ import annotations

import torch

from sglang_dsa_plugin.cache.layouts import FP8, INDEX_DIM, INDEX_PAGE_BYTES, LATENT_DIM, PAGE_SIZE, ROPE_DIM, ROW_DIM

# Rows whose float32 values are alive at a time while fp8 ones are made.
_CHUNK = 1 << 18


class Maker:
    """Random tensors of one input set on `device`; the same seed gives the same set on the same device."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Normal values; e4m3 by way of float32."""
        if dtype == FP8:
            return self.normal(*shape, dtype=torch.float32).to(FP8)
        return torch.empty(*shape, dtype=dtype, device=self.device).normal_(generator=self.generator)

    def powers(self, *shape: int) -> torch.Tensor:
        """Scales as this package writes them: f32 powers of two, here 2^-3 to 1."""
        return 2.0 ** torch.randint(-3, 1, shape, generator=self.generator, device=self.device).float()

    def latent_rows(self, count: int, layout: str) -> torch.Tensor:
        """Cache rows [count, width] of `bf16_1152` or `fp8_656`."""
        if layout == "bf16_1152":
            return self.normal(count, ROW_DIM)
        width = LATENT_DIM + LATENT_DIM // INDEX_DIM * 4 + 2 * ROPE_DIM
        rows = torch.empty(count, width, dtype=torch.uint8, device=self.device)
        for part in rows.split(_CHUNK):
            some = part.shape[0]
            part[:, :LATENT_DIM] = self.normal(some, LATENT_DIM, dtype=FP8).view(torch.uint8)
            part[:, LATENT_DIM : -2 * ROPE_DIM] = self.powers(some, LATENT_DIM // INDEX_DIM).view(torch.uint8)
            part[:, -2 * ROPE_DIM :] = self.normal(some, ROPE_DIM).view(torch.uint8)
        return rows

    def index_pages(self, count: int) -> torch.Tensor:
        """fp8 index pages u8 [count, 8448]."""
        pages = torch.empty(count, INDEX_PAGE_BYTES, dtype=torch.uint8, device=self.device)
        keys = PAGE_SIZE * INDEX_DIM
        for part in pages.split(_CHUNK // PAGE_SIZE):
            part[:, :keys] = self.normal(part.shape[0], keys, dtype=FP8).view(torch.uint8)
            part[:, keys:] = self.powers(part.shape[0], PAGE_SIZE).view(torch.uint8)
        return pages

    def page_table(self, requests: int, tokens: int, width: int | None = None) -> torch.Tensor:
        """int32 [requests, pages]: every request's pages for `tokens` tokens, shuffled over the pool; `width` tokens
        wide, with page 0 past them.
        """
        each = -(-tokens // PAGE_SIZE)
        order = torch.randperm(requests * each, generator=self.generator, device=self.device)
        table = order.view(requests, each).int()
        return torch.nn.functional.pad(table, (0, -(-(width or tokens) // PAGE_SIZE) - each))

    def picks(self, windows: torch.Tensor, tokens: int, k: int) -> torch.Tensor:
        """int32 [R, k]: for each row min(k, windows[r]) different random positions below windows[r], ascending, then
        -1. windows: int [R], at most `tokens`.
        """
        found = []
        column = torch.arange(tokens, device=self.device)
        for part in windows.split(max(1, (1 << 27) // tokens)):
            luck = torch.rand(part.shape[0], tokens, generator=self.generator, device=self.device)
            luck = luck.masked_fill(column >= part.unsqueeze(1), -1)
            best = luck.topk(min(k, tokens), dim=1)
            at = best.indices.masked_fill(best.values < 0, tokens).sort(dim=1).values
            found.append(at.masked_fill(at == tokens, -1).int())
        picks = torch.cat(found)
        return torch.nn.functional.pad(picks, (0, k - picks.shape[1]), value=-1)

    def slots(self, picks: torch.Tensor, table: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
        """Cache slots int32 of picked positions [R, k]; -1 stays."""
        page = table[owner.long()].gather(1, (picks.clamp(min=0) // PAGE_SIZE).long())
        return torch.where(picks < 0, -1, page * PAGE_SIZE + picks % PAGE_SIZE).int()

    def cos_sin(self, positions: int) -> torch.Tensor:
        """Rope table f32 [positions, 64]: 32 cos, then 32 sin."""
        turn = torch.arange(positions, device=self.device).unsqueeze(1)
        angle = turn * 10000.0 ** (-torch.arange(0, ROPE_DIM, 2, device=self.device) / ROPE_DIM)
        return torch.cat((angle.cos(), angle.sin()), dim=1)

    def rows_of_requests(self, requests: int) -> torch.Tensor:
        """int32 [requests]: one row a request, as in decode."""
        return torch.arange(requests, dtype=torch.int32, device=self.device)

    def full(self, rows: int, value: int) -> torch.Tensor:
        """int32 [rows] of one value."""
        return torch.full((rows,), value, dtype=torch.int32, device=self.device)
