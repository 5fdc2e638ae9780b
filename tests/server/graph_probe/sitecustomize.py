"""Put on PYTHONPATH of a server, and so of every process it starts: runs every prefill as SGLang runs one whose rest is
a CUDA graph, on padded rows and with the same state around it, but without a graph, so that a CPU can tell whether the
answers are right. What this leaves out is the recording: memory that a graph reuses.
"""

import contextlib
import copy
import importlib.util
import sys

EAGER = "sglang.srt.model_executor.runner.eager_runner"


class _Unbroken:
    """In the place of what records a graph: what is recorded whole must not ask it to stop and go on."""

    def _end_current_segment(self):
        raise RuntimeError("a whole prefill graph breaks here")


def as_on_a_gpu():
    """Attention's break holds the product before it, as it does where a graph can be recorded."""
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import is_in_breakable_cuda_graph
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla

    forward_mla.is_graph_dsa_split_op_surface = lambda forward_batch: (
        is_in_breakable_cuda_graph() and forward_batch.forward_mode.is_extend_without_speculative()
    )


def padded(original):
    """`EagerRunner._execute_extend` as `PrefillCudaGraphRunner` would run the batch."""

    def run(self, forward_batch, pp_proxy_tensors=None):
        if not forward_batch.forward_mode.is_extend_without_speculative():
            return original(self, forward_batch, pp_proxy_tensors)
        import torch
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
        from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import breakable_cuda_graph as recorder
        from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import enable_breakable_cuda_graph
        from sglang.srt.model_executor.runner_utils.forward_batch import set_forward_batch
        from sglang.srt.model_executor.runner_utils.prefill_graph import prefill_graph_scope

        as_on_a_gpu()
        runner = self.model_runner
        forward_batch = self.load_batch(forward_batch, pp_proxy_tensors)
        tokens = len(forward_batch.input_ids)
        more = (1 << tokens.bit_length()) - tokens  # at least one row of padding
        static = copy.copy(forward_batch)
        for name in ("input_ids", "positions", "out_cache_loc"):
            setattr(static, name, torch.nn.functional.pad(getattr(forward_batch, name), (0, more)))
        static.global_num_token_non_padded_cpu = tokens
        static.attn_cp_metadata = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(enable_breakable_cuda_graph())
            stack.enter_context(set_forward_batch(static))
            stack.enter_context(prefill_graph_scope(full_graph=False, raw_num_tokens=tokens))
            stack.enter_context(forward_context(ForwardContext(attn_backend=runner.attn_backend), forward_batch=static))
            whole = runner.attn_backend.prefill.whole
            if whole is not None:
                from sglang_dsa_plugin.backend.dense_fallback import DENSE_GRAPH_SIZES

                # As if this had been recorded, where it would be on a GPU.
                whole.dense_tokens = DENSE_GRAPH_SIZES[-1]
                whole.sizes = {path: [tokens + more] for path in whole.paths_for(tokens + more)}
            runner.attn_backend.init_forward_metadata(forward_batch)
            if whole is not None and whole.take() is not None:
                # What is recorded runs on all rows, and knows nothing of the batch but what was filled in.
                from sglang_dsa_plugin.adapter.whole_prefill import unbroken

                static.global_num_token_non_padded_cpu = tokens + more
                static.out_cache_loc = None
                stack.enter_context(unbroken(runner.model))
                stack.callback(recorder._current_capture_var.reset, recorder._current_capture_var.set(_Unbroken()))
            return runner.model.forward(static.input_ids, static.positions, static)

    return run


class _Finder:
    """Finds the runner's module as usual and wraps it once it is executed."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != EAGER:
            return None
        sys.meta_path.remove(_Finder)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.EagerRunner._execute_extend = padded(module.EagerRunner._execute_extend)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder)
