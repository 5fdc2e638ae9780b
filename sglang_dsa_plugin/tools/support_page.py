"""docs/support.md, written from the support table: python -m sglang_dsa_plugin.tools.support_page > docs/support.md"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from sglang_dsa_plugin import kernel_flags, plan, served_flags, support, tuned
from sglang_dsa_plugin.support_row import ROW_STEPS

# Compute capability (SM) -> GPUs that have it, for example.
GPUS = {
    80: "A100",
    86: "A10, RTX 3090",
    89: "L4, L40S, RTX 4090",
    90: "H100, H200",
    100: "B200",
    103: "B300",
    120: "RTX 5090, RTX PRO 6000",
    121: "GB10",
}
HEADS = (8, 16, 32, 64, 128)
INDEX_HEADS = (16, 32, 64)
# (model dtype, values of --kv-cache-dtype that mean the same)
POOLS = (
    (torch.bfloat16, ("auto", "bf16")),
    (torch.bfloat16, ("fp8_e4m3",)),
    (torch.float32, ("auto",)),
)

_HEAD = """# What runs where

Which kernel does what on which device. Written from the support table (`sglang_dsa_plugin/support.py`); a test compares
the two.

A cell names the implementation that is chosen. `triton`, `cuda`, `cuda_portable`, `cuda_portable_fp8` (three in CUDA
C++), `numba` and `torch` are this package's; `flash_mla`, `flash_mla_kv`, `fa3` and `deep_gemm` are kernels of packages
that SGLang brings, called through checked adapters. `a / b` means a with the package installed, b without it; `a, b
from 16 rows on` means that the number of rows decides. `latent row` is the size of a token's row in a layer's KV cache;
its layout is named by type and size, as `bf16_1152` ([operators.md](operators.md)). `decode graph` says whether decode
runs in CUDA graphs.

Head counts are those of one rank, for picks (scores and selection) those of the indexer. Rows are the
requests of a decode step. Prefill means 256 rows or more; a prefill of fewer takes the column of decode. For picks it
means 256 rows a request on average or more; with fewer they are `triton`. Under `triton` and `deep_gemm`, picks on SM
9.0 are selected in CUDA C++, where cuda.core is installed and NVRTC serves the GPU, unless
`SGLANG_DSA_PLUGIN_IMPL=triton` asks for Triton alone. Where dense prefill is `torch` on a GPU and sparse is not, short
prompts run sparse instead. The choice does not depend on k from 64 to 4096, nor on the length of a request, but for
what its row below says of `deep_gemm`. Kernels of other packages that have not been measured to be faster are taken by
name only; they have a table of their own below.
"""

_BY_NAME = """## By name

Implementations that need a package, most of them to call its kernels, and where they can run. `unasked` says where the
table takes one by itself; elsewhere a flag (below) or `SGLANG_DSA_PLUGIN_IMPL` takes it. For `sparse_mla` on SM 9.0 the
measured table above goes ahead of it.
"""


def page() -> str:
    """The whole file."""
    return "\n".join([_HEAD, *_gpus(), *_cpu(), *_by_name(), *_combinations()]).rstrip() + "\n"


def _gpus() -> Iterator[str]:
    same: dict[str, list[int]] = {}
    for sm in GPUS:
        run = "**not run**: compiled for, chosen by a mocked capability"
        if sm == 90:
            run = "run on such a GPU (H200)"
        same.setdefault(f"{run}\n\n{_table('cuda', sm)}{_measured(sm)}", []).append(sm)
    for text, sms in same.items():
        names = ", ".join(f"SM {sm // 10}.{sm % 10} ({GPUS[sm]})" for sm in sms)
        yield f"## {names}\n\n{text}"


def _measured(sm: int) -> str:
    """The choices of `bench tune` that GPUs of this capability go by, or nothing."""
    path = tuned.file_for("", sm)
    if path is None:
        return ""
    lines = [
        f"\n**For sparse attention on such a GPU this goes ahead of the cells above**, which then hold where it has no "
        f"entry or its kernel cannot run: what was measured, with the times in `tuned/{path.name}`. A number of heads "
        "in between goes by its nearest neighbour.\n",
        " | ".join(
            ["| layout | heads", f"fewer than {ROW_STEPS[1]} rows", *(f"{step} or more" for step in ROW_STEPS[1:])]
        )
        + " |",
        "| --- " * (len(ROW_STEPS) + 2) + "|",
    ]
    choices = tuned.read(path)
    for layout in dict.fromkeys(key[1] for key in choices):
        known = {heads for (_, rows_of, _), by_heads in choices.items() if rows_of == layout for heads in by_heads}
        for heads in sorted(known):
            taken = [tuned.nearest(choices, "sparse_mla", layout, heads, step) or "" for step in ROW_STEPS]
            lines.append(f"| {layout} | {heads} | {' | '.join(taken)} |")
    return "\n".join(lines) + "\n"


def _cpu() -> Iterator[str]:
    yield "## CPU\n\nrun and served, see docs/benchmarks.md\n\n" + _table("cpu", None)


def _table(device: str, sm: int | None) -> str:
    picks = ("picks, decode", "picks, prefill")
    columns = ("latent row", "decode", "prefill", "dense prefill", *picks, "decode graph")
    lines = [f"| model, `--kv-cache-dtype` | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    for dtype, values in POOLS:
        found, *others = (
            plan.plan_serving(model_dtype=dtype, kv_cache_dtype=kv, device=device, sm=sm) for kv in values
        )
        if any(replace(other, reasons=found.reasons) != found for other in others):
            raise ValueError(f"{' and '.join(values)} do not mean the same on {device} {sm}")
        cells = [
            _over_heads(device, sm, dtype, found.latent.name, operator)
            for operator in ("sparse_mla", "sparse_mla_prefill", "dense_mha", "index_select_paged", plan.INDEX_PREFILL)
        ]
        graph = "yes" if found.capturable else "no"
        name = f"{str(dtype).removeprefix('torch.')}, {' or '.join(values)}"
        lines.append(f"| {name} | {found.latent.row_bytes} B | {' | '.join(cells)} | {graph} |")
    return "\n".join(lines) + "\n"


def _over_heads(device: str, sm: int | None, dtype: torch.dtype, layout: str, operator: str) -> str:
    """Implementations by head count (for picks the indexer's), in one cell: "triton; 64 heads: flash_mla / triton"."""
    index = plan.USES.get(operator) == "index_select_paged"

    def name(heads: int) -> str:
        both = []
        for packages in ("all", "none"):
            found = plan.operator_choices(device, layout, sm, dtype, HEADS[0] if index else heads, packages, heads)
            # Prefill's picks are there where they are by another implementation.
            choice = found.get(operator) or found["index_select_paged"]
            both.append(choice.words if operator in ("sparse_mla", "index_select_paged") else choice.name)
        return " / ".join(dict.fromkeys(both))

    groups: dict[str, list[int]] = {}
    for heads in INDEX_HEADS if index else HEADS:
        groups.setdefault(name(heads), []).append(heads)
    usual = max(groups, key=lambda n: len(groups[n]))
    rest = [f"{_words(heads)} heads: {found}" for found, heads in groups.items() if found != usual]
    return "; ".join([usual, *rest])


def _words(numbers: list[int]) -> str:
    return " and ".join(map(str, numbers))


def _by_name() -> Iterator[str]:
    yield _BY_NAME
    yield "| operators | name | SM | rows, heads, k | unasked | |\n| --- | --- | --- | --- | --- | --- |"
    operators: dict[str, list[str]] = {}
    for row in support.rows():
        if row.first is not None:
            where = "no" if row.by_name_only else row.first.words()
            where += "" if row.planned is None else f"; decode: {row.planned.words()}"
            cells = f"`{row.name}` | {row.sm_words()} | {row.limits()} | {where} | {row.note}"
            operators.setdefault(cells, []).append(row.operator)
    yield "\n".join(f"| {', '.join(names)} | {cells} |" for cells, names in operators.items()) + "\n"


def _combinations() -> Iterator[str]:
    yield "## Combinations\n"
    yield "What is served. Any other value is refused when the server starts, by a message that names the flag and"
    yield "what to do:\n"
    yield "| flag | served |\n| --- | --- |"
    yield "| `--page-size` | 64, or left out |"
    yield f"| `--kv-cache-dtype` | {', '.join(plan.KV_CACHE_DTYPES)} |"
    yield "| `--dtype` | bfloat16, float32 |"
    yield "| `--cuda-graph-backend-prefill` | breakable, disabled, or left out |"
    for flag, values in (kernel_flags.served_values() | served_flags.served_values()).items():
        yield f"| `{flag}` | {values} |"


if __name__ == "__main__":
    print(page(), end="")
