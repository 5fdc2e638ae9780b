"""Kernels compiled for the CPU they run on by numba, which SGLang itself requires.

A decode step of a small model is hundreds of torch operators on a handful of values, each some microseconds of dispatch
and, with several threads, a barrier that costs milliseconds where another process has the other core. Here a whole
operator is one call on one thread. Compiled at the first call (seconds), then read from numba's cache on disk.
"""
