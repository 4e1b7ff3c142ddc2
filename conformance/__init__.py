"""The device against PyTorch CPU, over PyTorch's own operator, module and optimizer databases.

``python -m conformance run`` records one line per (suite, entry, dtype); ``python -m conformance report`` writes
``docs/conformance.md``.
"""
