"""A prefill in a CUDA graph answers as the same prefill outside of one.

Graphs hold up to 512 tokens here, so a prompt that comes alone runs in one, and together with a longer prompt does not.
SGLang takes the next larger graph if that is at most twice the prompt. Products of few and of many rows round other
sums (a float32 model has no prefill graphs), and where an expert or a pick is decided by that, a position moves by as
much as if it were wrong: with experts two of four positions moved by 1.96 between two eager batches on a CPU. So these
models have no experts. Positions up to k have no picks to make: for them the bound is what two graphs of unlike size
differ by for the same tokens, the smaller with the prompt alone, the larger with more behind it. Past k a rounding
changes one pick of 256 here and there, and its position moves by more: there the bound is what prefills of unlike size
outside of graphs differ by. Each layer of such prefills is held against fp64 in test_live_capture.py.
"""

import pytest

from tests.server.conftest import server, slot  # noqa: F401
from tests.server.harness import ModelSpec, ServerSpec, random_prompt

K = 256
GRAPHS = (8, 64, 256, 288, 512)
LENGTHS = (4, 7, 64, 255, 256, 257, 400, 511, 512)
ARGS = ("--max-total-tokens", "40000", "--chunked-prefill-size", "4096", "--enable-metrics")
ARGS += ("--cuda-graph-bs-prefill", *map(str, GRAPHS))
SHAPES = [("deepseek_v32", 16, "bf16"), ("glm_moe_dsa", 64, "fp8_e4m3")]


# By form: what is set, and the path of a new prompt of up to k tokens, of one that follows a cached prefix, and of few
# tokens behind a prefix that passes k.
OFF = (("SGLANG_DSA_PLUGIN_WHOLE_PREFILL", "off"),)
NO_DENSE = (("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "0"),)
LONG = (("SGLANG_DSA_PLUGIN_WHOLE_PREFILL", "long"),)
FORMS = {
    "": (OFF, "graph", "graph", "graph"),
    "-whole": ((), "whole_dense", "whole", "graph"),
    "-sparse": (NO_DENSE, "whole", "whole", "graph"),
    "-long": (LONG, "whole_dense", "whole", "whole_scored"),
}


def spec(arch, heads, kv, form=""):
    model = ModelSpec.of(arch, dtype="bfloat16", heads=heads, index_topk=K, layers=3, dense_layers=3, max_position=8192)
    return ServerSpec(
        f"prefill-graph-{arch[:3]}-{heads}-{kv}{form}", model, (*ARGS, "--kv-cache-dtype", kv), FORMS[form][0]
    )


SPECS = [spec(*shape, form) for form in FORMS for shape in SHAPES]
pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("server", SPECS, indirect=True)]


def differences(a, b):
    """The largest difference between log-probabilities of each position: those up to k, those past it."""
    rows = min(len(a), len(b))
    assert rows
    each = (a[:rows] - b[:rows]).abs().amax(1)
    return each[:K], each[K:]


def first_and_path(server, prompts):  # noqa: F811
    """Log-probabilities at every position of the first prompt, and the paths that the batch took."""
    server.flush()
    before = server.prefills()
    answer = server.generate(prompts)[0]
    after = server.prefills()
    return answer.rows, {path for path in after if after[path] > before[path]}


def in_graph(server, longest, cached=False):  # noqa: F811
    """The path of a batch in a graph whose longest prompt has so many tokens; cached: some of them were there."""
    form = next((form for form in FORMS if form and server.spec.name.endswith(form)), "")
    if longest > K:
        return {FORMS[form][3] if cached else "graph"}
    return {FORMS[form][1 + cached]}


def bound(server, lengths):  # noqa: F811
    """Twice what prompts of these lengths differ by between two graphs up to k, and a rounded sum."""
    noise = 0.0
    for length in lengths:
        prompt = random_prompt(length, seed=length)
        small, path = first_and_path(server, [prompt])
        assert path == in_graph(server, length), (length, path)
        large, path = first_and_path(server, [prompt + random_prompt(500 - length, seed=3)])
        assert path == {"graph"}, (length, path)
        noise = max(noise, float(differences(small, large)[0].max()))
        assert noise < 0.5, (length, noise)
    return 2 * noise + 0.02


def bound_past_k(server, prompts):  # noqa: F811
    """Twice what positions past k of these prompts differ by between prefills of unlike size outside of graphs."""
    noise = 0.0
    for prompt in prompts:
        first = None
        for beside in (300, 1000, 3000):
            rows, path = first_and_path(server, [prompt, random_prompt(beside, seed=beside)])
            assert path == {"sparse"}, (len(prompt), beside, path)
            first = rows if first is None else first
            noise = max(noise, float(differences(first, rows)[1].max()))
    assert noise < 0.75, noise
    return 2 * noise + 0.02


def test_a_graph_answers_as_eager(server, record_testsuite_property):  # noqa: F811
    up_to_k, past_k, long = [], [], []
    for length in LENGTHS:
        prompt = random_prompt(length, seed=length)
        graph, path = first_and_path(server, [prompt])
        assert path == in_graph(server, length), (length, path)
        eager, path = first_and_path(server, [prompt, random_prompt(700, seed=1)])
        assert path == {"sparse"}, (length, path)
        assert len(graph) == len(eager) == length
        near, far = differences(graph, eager)
        up_to_k.append(float(near.max()))
        if length > K:
            past_k.append(float(far.max()))
            long.append(prompt)
    allowed = bound(server, [n for n in LENGTHS if n <= 400])
    allowed_far = bound_past_k(server, long)
    near, far = (", ".join(f"{difference:.2g}" for difference in each) for each in (up_to_k, past_k))
    record_testsuite_property(
        server.spec.name,
        f"graph against eager: up to k {near} of {allowed:.3g}, past k {far} of {allowed_far:.3g}",
    )
    assert all(difference <= allowed for difference in up_to_k)
    assert all(difference <= allowed_far for difference in past_k)


def test_a_cached_prefix_and_several_prompts_in_one_graph(server, record_testsuite_property):  # noqa: F811
    prompts = [random_prompt(n, seed=10 + n) for n in (40, 130, 200)]
    alone = [first_and_path(server, [prompt])[0] for prompt in prompts]
    server.flush()
    before = server.prefills()
    together = server.generate(prompts)
    after = server.prefills()
    assert {path for path in after if after[path] > before[path]} == in_graph(server, 200)
    apart = max(float(differences(a, b.rows)[0].max()) for a, b in zip(alone, together, strict=True))
    # 64 tokens are cached, and 150 more follow: all of them within k.
    near = random_prompt(214, seed=98)
    new, _ = first_and_path(server, [near])
    server.flush()
    server.generate([near[:66]])
    before = server.prefills()
    rest = server.generate([near], start=64)[0]
    after = server.prefills()
    assert rest.meta["cached_tokens"] == 64
    assert {path for path in after if after[path] > before[path]} == in_graph(server, 214, cached=True)
    apart = max(apart, float((new[rest.first - 1 :] - rest.rows).abs().max()))
    # 320 tokens of another prompt are cached, and 150 more follow.
    text = random_prompt(470, seed=99)
    whole, _ = first_and_path(server, [text])
    server.flush()
    server.generate([text[:330]])
    before = server.prefills()
    rest = server.generate([text], start=320)[0]
    after = server.prefills()
    assert rest.meta["cached_tokens"] == 320
    assert {path for path in after if after[path] > before[path]} == in_graph(server, 470, cached=True)
    later = whole[rest.first - 1 :]
    assert len(later) == len(rest.rows)
    # All of them lie past k.
    far = (later - rest.rows).abs().amax(1)
    allowed, allowed_far = bound(server, (40, 130, 200, 214)), bound_past_k(server, [text])
    record_testsuite_property(
        f"{server.spec.name} together",
        f"{apart:.3g} of {allowed:.3g}, behind a cached prefix {float(far.max()):.3g} of {allowed_far:.3g}",
    )
    assert apart <= allowed
    assert float(far.max()) <= allowed_far
