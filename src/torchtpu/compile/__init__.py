"""The Dynamo backend ``"tpu"``: an FX graph becomes one XLA program, through the same lowerings as eager execution."""

from torchtpu.compile.backend import backend

__all__ = ["backend"]
