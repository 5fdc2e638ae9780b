"""What DeepGEMM's scores over pages need of a step besides queries and keys: made once, read by the scores of all
layers.

- `sizes`: keys that are scored of a row. At least one: DeepGEMM's schedule reads out of bounds when all are zero
  (deepseek-ai/DeepGEMM#354). A row not longer than `skip` counts as one key;
- `table`: the page table's row of each row's request, since it wants one a row, cut to the pages there are. Entries
  past a row's keys are never read, so they are not written;
- `schedules`: the share of every processor, for each group of rows that one call takes. Where no row is longer than
  `skip`, all shares are empty on SM 9.x, and scoring costs a launch.

Three launches, and nothing is read on the host, so a CUDA graph that holds them follows lengths and pages.

DeepGEMM compiles a schedule's kernel for every 32 rows more, which takes seconds. SGLang runs every shape that it
records once before; a step outside of graphs may have any number of rows, so its calls take at most EAGER_ROWS, and a
server has the kernels of these few compiled when it starts (deep_gemm_load.py).
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch

from sglang_dsa_plugin.cache.layouts import PAGE_SIZE
from sglang_dsa_plugin.kernels.triton import step_rows

logger = logging.getLogger(__name__)

EAGER_ROWS = 256  # rows a call of a step outside of graphs
COMPILED_ROWS = 32  # a schedule's kernel serves so many rows more than the one before
ALIGNED_ROWS = 4  # lengths of so many rows are 16 bytes
_ROWS = 2048  # rows a call: the schedule keeps a number a row in shared memory (deepseek-ai/DeepGEMM#322)
_ROWS_PER_PROCESSOR_FROM = 10  # major compute capability, from which on a call takes a row a processor


@dataclass(frozen=True)
class Plan:
    """sizes int32 [R, 1], table int32 [R, pages], schedules: int32 [processors + 1, 2] for every `group` rows (module
    docstring).
    """

    sizes: torch.Tensor
    table: torch.Tensor
    schedules: tuple[torch.Tensor, ...]
    group: int


def rows_a_call(device: torch.device) -> int:
    """How many rows a call of DeepGEMM takes at most."""
    import deep_gemm

    return deep_gemm.get_num_sms() if _major(device) >= _ROWS_PER_PROCESSOR_FROM else _ROWS


def make(
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
    pages: int,
    width: int,
    skip: int,
    group: int | None = None,
) -> Plan:
    """For at least one row. pages: of the cache. width: scores of a row, at most those that the page table covers.
    group: rows a call, at most `rows_a_call`, which it is by default.
    """
    import deep_gemm

    device, rows = lengths.device, lengths.shape[0]
    sizes, table = step_rows.rows_of(lengths, page_table, row_to_request, pages, width, skip)
    group, processors, schedules = group or rows_a_call(device), deep_gemm.get_num_sms(), []
    for top in range(0, rows, group):
        part = sizes[top : top + group]
        schedule = deep_gemm.get_paged_mqa_logits_metadata(part, PAGE_SIZE, processors)
        if skip and _major(device) < _ROWS_PER_PROCESSOR_FROM:
            step_rows.clear_without_long(schedule, lengths[top : top + group], skip)
        schedules.append(schedule)
    return Plan(sizes, table, tuple(schedules), group)


def eager_group(rows: int, most: int) -> int:
    """Rows a call, of a step outside of graphs of so many rows, where a call may have `most`: as even as they come in
    multiples of COMPILED_ROWS, or of 4 where a call may not have so many. So what belongs to a row is as aligned in
    every call as in the first: Triton compiles one kernel for all. Fewer than 4 are as many as they may be.
    """
    most = min(most, EAGER_ROWS)
    if rows <= most:
        return rows
    unit = next((unit for unit in (COMPILED_ROWS, ALIGNED_ROWS) if unit <= most), 1)
    even = -(-rows // -(-rows // most))
    return min(even + -even % unit, most - most % unit)


@functools.cache
def say_too_small(least_mb: int) -> None:
    """Warn that no plan is made since the budget holds no row; once a size and process, as every step comes by."""
    logger.warning(
        "sglang-dsa-plugin: the budget of score memory holds no row of DeepGEMM's scores; unless DeepGEMM was asked "
        "for by name, decode has them by Triton, in stretches; set SGLANG_DSA_PLUGIN_SCORES_MB to %d or more for "
        "DeepGEMM's",
        least_mb,
    )


def _major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]
