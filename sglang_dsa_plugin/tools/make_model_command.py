"""sglang-dsa make-model: command line of tools/make_model.py."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Arch(StrEnum):
    deepseek_v32 = "deepseek_v32"
    glm_moe_dsa = "glm_moe_dsa"


class Rope(StrEnum):
    default = "default"
    yarn = "yarn"


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"


class Quant(StrEnum):
    none = "none"
    fp8_block = "fp8-block"


def make_model(
    out_dir: Annotated[Path, typer.Argument(help="New or empty directory for the checkpoint.")],
    arch: Annotated[Arch, typer.Option(help="Model family.")] = Arch.deepseek_v32,
    layers: Annotated[int, typer.Option(min=1)] = 3,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 256,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 16,
    index_heads: Annotated[int | None, typer.Option(min=1, help="Indexer heads; 64 or 32 by family.")] = None,
    index_topk: Annotated[int, typer.Option(min=1, help="Picks a token.")] = 64,
    q_lora_rank: Annotated[int, typer.Option(min=1)] = 256,
    experts: Annotated[int, typer.Option(min=1)] = 8,
    experts_per_token: Annotated[int, typer.Option(min=1)] = 2,
    moe_intermediate: Annotated[int, typer.Option(min=1)] = 128,
    intermediate: Annotated[int, typer.Option(min=1)] = 512,
    dense_layers: Annotated[int, typer.Option(min=0, help="Leading layers with a dense MLP.")] = 1,
    vocab: Annotated[int, typer.Option(min=1, help="Vocabulary, at least 262.")] = 320,
    max_position: Annotated[int, typer.Option(min=1)] = 8192,
    rope: Annotated[Rope, typer.Option()] = Rope.default,
    rope_theta: Annotated[float | None, typer.Option(help="1e4 or 8e6 by family.")] = None,
    schedule: Annotated[str | None, typer.Option(help="GLM: a letter a layer, F (own indexer) or S (reuses).")] = None,
    seed: Annotated[int, typer.Option()] = 0,
    dtype: Annotated[Dtype, typer.Option()] = Dtype.bfloat16,
    quant: Annotated[Quant, typer.Option(help="fp8-block: the published DeepSeek format.")] = Quant.none,
    twin: Annotated[Path | None, typer.Option(help="With --quant: also write the dequantised model here.")] = None,
    nextn: Annotated[int, typer.Option(min=0, max=1, help="1 adds a draft layer for speculative decoding.")] = 0,
    echo: Annotated[float, typer.Option(help="With --nextn: how guessable the model is.")] = 0.5,
) -> None:
    """Write a small random DSA checkpoint that SGLang and Hugging Face both load."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    with console.status("importing transformers"):
        from transformers.utils import logging

        from sglang_dsa_plugin.config import DsaConfig
        from sglang_dsa_plugin.tools import make_model as tool

        logging.disable_progress_bar()
    try:
        with console.status("writing weights"):
            made = tool.make_model(
                out_dir,
                arch.value,
                layers=layers,
                hidden=hidden,
                heads=heads,
                index_heads=index_heads,
                index_topk=index_topk,
                q_lora_rank=q_lora_rank,
                experts=experts,
                experts_per_token=experts_per_token,
                moe_intermediate=moe_intermediate,
                intermediate=intermediate,
                dense_layers=dense_layers,
                vocab=vocab,
                max_position=max_position,
                rope=rope.value,
                rope_theta=rope_theta,
                schedule=schedule,
                seed=seed,
                dtype=dtype.value,
                quant=None if quant is Quant.none else quant.value,
                twin=twin,
                nextn=nextn,
                echo=echo,
            )
    except ValueError as error:
        Console(stderr=True).print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    config = DsaConfig.from_hf(made.config)
    table = Table(show_header=False, box=None)
    letters = "".join("FS"[config.layer_reuses_picks(i)] for i in range(config.num_layers))
    rows = {
        "model": f"{config.architecture} in {made.path}",
        "size": f"{made.parameters / 1e6:.1f} M parameters, {made.size_bytes / 1e6:.1f} MB, {dtype.value}",
        "attention": f"{config.num_heads} heads, {config.index_n_heads} index heads, top {config.index_topk}",
        "indexer": f"{config.index_rope_layout} rope, theta {config.rope_theta:g}, layers {letters} (S reuses picks)",
        "quantised": f"{len(made.quantized)} weights, fp8 blocks of 128 x 128" if made.quantized else "no",
    }
    if nextn:
        rows["draft"] = f"one layer, echo {echo:g}"
    if made.twin:
        rows["twin"] = f"{made.twin}, the same values dequantised"
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
