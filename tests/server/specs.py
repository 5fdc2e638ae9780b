"""The models and servers of these tests."""

from pathlib import Path

from tests.server.harness import GPU, ModelSpec, ServerSpec

V32 = ModelSpec.of("deepseek_v32")
YARN = ModelSpec.of("deepseek_v32", rope="yarn")
# F S F S: shared layers take the picks of the layer before, and the border of two pipeline stages lies between them.
GLM = ModelSpec.of("glm_moe_dsa", layers=4, schedule="FSSF")
MODELS = {"v32": V32, "yarn": YARN, "glm": GLM}

# With it SGLang's own sparse attention raises when it is called, in every process (probe/sitecustomize.py).
PROBE = str(Path(__file__).parent / "probe")
# With it every prefill runs as between the segments of a CUDA graph, or as recorded in one without breaks.
GRAPH_PROBE = str(Path(__file__).parent / "graph_probe")
F32 = ("--dtype", "float32")
CHUNKED = ("--chunked-prefill-size", "128")
RETRACT = (("SGLANG_TEST_RETRACT", "1"),)
# Ranks on GPUs exchange their sums by NCCL alone: what is tested are their picks, caches and graphs, and the faster
# ways between GPUs may use NVLink multicast, which a borrowed host can forbid.
NCCL_ALONE = ("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion")
TP2 = ("--tp-size", "2", *(NCCL_ALONE if GPU else ()))
# How a server may differ without any effect on its answers.
FORMS = {
    "plain": ((), ()),
    "chunked": (CHUNKED, ()),
    "retracting": ((), RETRACT),
    "tp2": (TP2, ()),
    "pp2": (("--pp-size", "2"), ()),
    "masked": ((), (("SGLANG_DSA_PLUGIN_MASKED_PREFILL", "on"),)),
    "graph": ((), (("SGLANG_DSA_PLUGIN_WHOLE_PREFILL", "off"), ("PYTHONPATH", GRAPH_PROBE))),
    "whole": ((), (("PYTHONPATH", GRAPH_PROBE),)),
    "wholelong": ((), (("SGLANG_DSA_PLUGIN_WHOLE_PREFILL", "long"), ("PYTHONPATH", GRAPH_PROBE))),
    # As "whole" for those who want no dense prefill.
    "wholesparse": ((), (("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "0"), ("PYTHONPATH", GRAPH_PROBE))),
}


def exact(model: str, form: str, index_topk: int = 64) -> ServerSpec:
    """A float32 server of a model in a form of FORMS; parts of a form's name are joined with +."""
    args, env = (*F32, "--enable-metrics"), (("PYTHONPATH", PROBE),)
    for part in form.split("+"):
        args, env = args + FORMS[part][0], env + FORMS[part][1]
    made, name = MODELS[model], f"{model}-{form}"
    if index_topk != 64:
        made = ModelSpec.of(made.arch, **dict(made.options) | {"index_topk": index_topk})
        name += f"-k{index_topk}"
    return ServerSpec(name, made, args, env)


PLAIN = exact("v32", "plain")
