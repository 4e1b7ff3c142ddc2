"""Tests run on XLA:CPU unless the environment says otherwise."""

import os

os.environ.setdefault("TORCHTPU_PLATFORM", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
