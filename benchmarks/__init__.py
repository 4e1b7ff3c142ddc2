"""Benchmarks against PyTorch CPU: each figure is a ratio of two measurements that took turns in one run."""
