"""How many threads a step runs on, on a CPU.

A decode step of a small model is some hundred operators of 5 to 400 us. With two threads every one of them ends at a
barrier, and when another process holds the second core, the first waits there for the scheduler's next tick: 4 ms
instead of 0.4 for one product of 2 MiB, measured on 2 cores with one busy process (docs/benchmarks.md). The server's
own tokenizer and its client are such processes. So a step whose weights one core reads in milliseconds takes one thread
and leaves the other cores to them; prefill and larger models take all.
"""

from __future__ import annotations

import torch

from sglang_dsa_plugin import settings
from sglang_dsa_plugin.support_row import SOME_ROWS

# One core reads some 10 GB/s: 13 ms.
SMALL_WEIGHTS = 128 << 20


class StepThreads:
    """Sets torch's threads for each step; `every` is what SGLang gave this process."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.every = torch.get_num_threads()
        self.weights = sum(p.numel() * p.element_size() for p in model.parameters())
        self.asked = settings.decode_threads()

    def for_decode(self, rows: int) -> int:
        """Threads of a decode step of `rows` requests.

        From SOME_ROWS on products are worth sharing. The support table takes torch from there on, too: on one thread
        it is slower than what is compiled for one (16 rows, 16 heads, k = 512 on a Zen 4: 13.7 ms against 7.8).
        """
        if self.asked is not None:
            return min(self.asked, self.every)
        return 1 if self.weights <= SMALL_WEIGHTS and rows < SOME_ROWS else self.every

    def set(self, decode_rows: int | None) -> None:
        """Before a step: decode_rows requests decode, or None for any other step."""
        threads = self.every if decode_rows is None else self.for_decode(decode_rows)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)

    def describe(self) -> str:
        """In words, for the start-up line."""
        if self.asked is not None:
            return f"decode on {self.for_decode(1)} of {self.every} threads (SGLANG_DSA_PLUGIN_DECODE_THREADS)"
        if self.for_decode(1) == self.every:
            return f"every step on {self.every} threads"
        return (
            f"decode of fewer than {SOME_ROWS} requests on 1 of {self.every} threads, since the weights are only "
            f"{self.weights >> 20} MiB"
        )
