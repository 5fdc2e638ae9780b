"""Which layers run an indexer and which reuse the picks of an earlier layer.

A config says it in one of four ways, and the first that is set decides, as in SGLang (dsa_layer_skips_topk):

1. indexer_types: one word a layer, "full" or "shared";
2. cli_factor > 1 (LongCat): full where layer % cli_factor = 0;
3. index_topk_pattern: one letter a layer, F or S;
4. index_topk_freq and index_skip_topk_offset: full where max(layer + 1 - offset, 0) % freq = 0; offset 2 when absent.

Frequency 4 and offset 3 over 78 layers (GLM-5.2) is 0, 1, 2, then every fourth from 6 to 74: 21 full layers.

Whether a layer reuses picks says nothing about whether the checkpoint holds indexer weights for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_dsa_plugin import config_keys as keys

SCHEDULE_KEYS = "indexer_types, cli_factor, index_topk_pattern, index_topk_freq, index_skip_topk_offset"


@dataclass(frozen=True)
class ReuseSchedule:
    """Which layers reuse the picks of the nearest earlier layer that has an indexer.

    Holds the one way that decides; offset is only read with freq.
    """

    indexer_types: tuple[str, ...] | None = None
    cli_factor: int = 1
    pattern: str | None = None
    freq: int = 1
    offset: int = 2

    def reuses(self, layer_id: int) -> bool:
        """Whether layer `layer_id` (from 0) reuses picks; layers past the end of an explicit list do not."""
        if self.indexer_types is not None:
            return layer_id < len(self.indexer_types) and self.indexer_types[layer_id] == "shared"
        if self.cli_factor > 1:
            return layer_id % self.cli_factor != 0
        if self.pattern is not None:
            return layer_id < len(self.pattern) and self.pattern[layer_id] == "S"
        return max(layer_id + 1 - self.offset, 0) % self.freq != 0


def read_schedule(config: Any, layers: int, nextn: int, architecture: str) -> ReuseSchedule:
    """Read the schedule of `layers` attention layers, of which a list may also cover `nextn` draft layers.

    Raises UnsupportedModel for unknown words, a list of another length, layer 0 reusing, or keys that contradict.
    A frequency of 1 says nothing against a more specific key, since config classes fill it in.
    """
    types, pattern = keys.get(config, "indexer_types"), keys.get(config, "index_topk_pattern")
    cli = keys.count(config, "cli_factor", 1)
    freq, offset = keys.count(config, "index_topk_freq", 1), keys.count(config, "index_skip_topk_offset", 2)
    for key, value in (("cli_factor", cli), ("index_topk_freq", freq), ("index_skip_topk_offset", offset)):
        if value == 0:
            raise keys.UnsupportedModel(f"{key}=0 must be at least 1: layer 0 has no earlier picks to reuse")
    sources: dict[str, ReuseSchedule] = {}
    if types is not None:
        sources["indexer_types"] = ReuseSchedule(indexer_types=_words("indexer_types", types, ("full", "shared")))
    if cli > 1:
        sources["cli_factor"] = ReuseSchedule(cli_factor=cli)
    if pattern is not None:
        sources["index_topk_pattern"] = ReuseSchedule(
            pattern="".join(_words("index_topk_pattern", pattern, ("F", "S")))
        )
    if freq > 1:
        sources["index_topk_freq"] = ReuseSchedule(freq=freq, offset=offset)
    if architecture.endswith("NextN"):
        # The draft's own layers are outside the target's list; only the keys' words matter here.
        return next(iter(sources.values()), ReuseSchedule())
    for key, given in (("indexer_types", types), ("index_topk_pattern", pattern)):
        if given is not None and len(given) not in (layers, layers + nextn):
            raise keys.UnsupportedModel(
                f"{key} has {len(given)} entries for {layers} attention layers; give one entry a layer"
            )
    table = {key: "".join("FS"[source.reuses(i)] for i in range(layers)) for key, source in sources.items()}
    if len(set(table.values())) > 1:
        said = "; ".join(f"{key} says {text}" for key, text in table.items())
        raise keys.UnsupportedModel(
            f"the keys of the reuse schedule contradict each other: {said} (F: own picks, S: reused); keep one of "
            f"{SCHEDULE_KEYS} and set the others to null"
        )
    for key, text in table.items():
        if text.startswith("S"):
            raise keys.UnsupportedModel(
                f"{key} makes layer 0 reuse picks, but no earlier layer has any; start it with 'full'"
            )
    return next(iter(sources.values()), ReuseSchedule())


def _words(key: str, value: Any, allowed: tuple[str, str]) -> tuple[str, ...]:
    if not isinstance(value, str | list | tuple):
        raise keys.UnsupportedModel(f"{key}={value!r} must be a list of {allowed[0]!r} and {allowed[1]!r}")
    wrong = sorted({str(word) for word in value if word not in allowed})
    if wrong:
        raise keys.UnsupportedModel(f"{key} has unknown entries {wrong}; it takes {allowed[0]!r} and {allowed[1]!r}")
    return tuple(value)
