"""The model's config.json as it was written, beside the object that SGLang makes of it.

Hugging Face's config classes fill in what a file lacks (theta 1e4, max_position_embeddings 4096, index_topk 2048), and
SGLang's class for LongCat drops what it does not know. On the object a key that was lost looks like one that was given,
so that a model would be served with the rope of another. Here the file is read by the same rules, and both must agree.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from sglang.srt.arg_groups.model_override_base import resolving_view
from transformers import PretrainedConfig

from sglang_dsa_plugin import config_keys as keys
from sglang_dsa_plugin.config import DsaConfig
from sglang_dsa_plugin.config_keys import UnsupportedModel

logger = logging.getLogger(__name__)
TYPES = {"rope_type", "type"}
ROPE_FORMS = ("rope_parameters", "rope_scaling")
# --context-length may raise the first on the object; how a schedule is written may differ where the layers are the
# same, which is compared.
NOT_COMPARED = ("max_position_embeddings", "schedule")
# As a file names what DsaConfig calls otherwise.
NAMES = {
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "yarn": "rope_scaling",
    "index_rope_layout": "indexer_rope_interleave",
    "rope_layout": "rope_interleave",
    "key_norm": "index_k_norm_type",
    "draft_shares_picks": "index_share_for_mtp_iteration",
}


def read_checked(server_args: Any, config: Any) -> DsaConfig:
    """DsaConfig of `config`, SGLang's object; raises UnsupportedModel also for what only the file tells."""
    written = read(server_args, config)
    if written is None:
        return DsaConfig.from_hf(config)
    return agreed(written, config)


def read(server_args: Any, config: Any) -> dict[str, Any] | None:
    """config.json with --json-model-override-args, or None, said in the log, where the file cannot be found again.

    SGLang has read the file by now, so it lies on this machine: nothing is asked of a network.
    """
    view = resolving_view(server_args)
    path = getattr(config, "_name_or_path", None) or view.model_path
    named = {"_configuration_file": view.decrypted_config_file} if view.decrypted_config_file else {}
    try:
        written, _ = PretrainedConfig.get_config_dict(path, revision=view.revision, local_files_only=True, **named)
    except OSError as error:
        logger.warning("config.json of %s was not found again, so what it lacks is not checked: %s", path, error)
        return None
    return overridden(written, json.loads(view.json_model_override_args or "{}"))


def overridden(written: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The file with the overrides, as SGLang applies them: the two rope forms are one to it, and keys of an object are
    merged into it. A type of rope replaces the one that is there, whatever its name.
    """
    result = dict(written)
    for key, value in overrides.items():
        names = ROPE_FORMS if key in ROPE_FORMS else (key,)
        current = next((result[name] for name in names if result.get(name)), None)
        if key in ROPE_FORMS and isinstance(value, Mapping) and isinstance(current, Mapping) and TYPES & value.keys():
            current = {name: said for name, said in current.items() if name not in TYPES}
        for name in names:
            result.pop(name, None)
        merged = isinstance(value, Mapping) and isinstance(current, Mapping) and key in (*ROPE_FORMS, "text_config")
        result[key] = {**current, **value} if merged else value
    return result


def agreed(written: dict[str, Any], config: Any) -> DsaConfig:
    """DsaConfig of SGLang's object, if the file by itself says all of it and says the same."""
    text = keys.get(written, "text_config")
    nested = text if isinstance(text, Mapping) else {}
    if keys.get(written, "index_topk") is None and keys.get(nested, "index_topk") is None:
        raise UnsupportedModel(
            f"index_topk is missing from config.json, and SGLang's config class fills in "
            f"{keys.get(config, 'index_topk')}; take it from the model's published config.json"
        )
    file = DsaConfig.from_hf({**written, "architectures": keys.get(config, "architectures")})
    read_as = DsaConfig.from_hf(config)
    for field in fields(DsaConfig):
        said, understood = getattr(file, field.name), getattr(read_as, field.name)
        if said != understood and field.name not in NOT_COMPARED:
            raise UnsupportedModel(
                f"{NAMES.get(field.name, field.name)}: config.json says {said!r}, and SGLang's config class makes "
                f"{understood!r} of it; write it the way the published config.json does"
            )
    if file.indexing_layers() != read_as.indexing_layers():
        raise UnsupportedModel(
            f"the reuse schedule: config.json makes {list(file.indexing_layers())} the layers with picks of their own, "
            f"and SGLang's config class {list(read_as.indexing_layers())}; write it the way the published config.json "
            "does"
        )
    return read_as
