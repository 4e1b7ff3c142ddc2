"""State of autocast; what it does to operators is tested with the operators."""

import pytest
import torch


def test_default_is_bfloat16():
    with torch.autocast("tpu"):
        assert torch.is_autocast_enabled("tpu")
        assert torch.get_autocast_dtype("tpu") is torch.bfloat16
    assert not torch.is_autocast_enabled("tpu")


def test_module_shorthand():
    with torch.tpu.amp.autocast(dtype=torch.float16):
        assert torch.get_autocast_dtype("tpu") is torch.float16
    assert isinstance(torch.tpu.amp.GradScaler(enabled=False), torch.amp.GradScaler)
    assert torch.tpu.get_amp_supported_dtype() == [torch.bfloat16, torch.float16]


def test_an_unsupported_dtype_disables_it():
    with pytest.warns(UserWarning, match="only supports dtypes"), torch.autocast("tpu", dtype=torch.float64):
        assert not torch.is_autocast_enabled("tpu")


@pytest.mark.parametrize(
    "operator",
    ["mm", "linear", "scaled_dot_product_attention", "layer_norm", "softmax.int", "norm.Scalar", "addcmul", "mse_loss"],
)
def test_operators_have_a_policy(operator):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", "AutocastPrivateUse1")


def test_binary_cross_entropy_is_refused():
    x = torch.empty(3, device="tpu")
    with torch.autocast("tpu"), pytest.raises(RuntimeError, match="unsafe to autocast"):
        torch.nn.functional.binary_cross_entropy(x, x)
