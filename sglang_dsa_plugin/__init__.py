"""DeepSeek Sparse Attention for SGLang: attention backend, KV pool and indexer as a plugin."""

__version__ = "0.1.0"
