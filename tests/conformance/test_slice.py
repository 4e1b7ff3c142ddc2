"""A fixed slice of the conformance suite, through the same code: every suite, every family, a few samples each."""

import pytest
import torch
from conformance.suites import SUITES
from conformance.worker import run_task

FORWARD = {
    "float32": (
        "add clamp where sum var cumsum sort topk gather index_put scatter_reduce.amax cat stack roll matmul einsum "
        "linalg.svd linalg.solve fft.rfft special.erfcx nn.functional.conv2d nn.functional.conv_transpose2d "
        "nn.functional.max_pool2d nn.functional.layer_norm nn.functional.scaled_dot_product_attention "
        "nn.functional.cross_entropy nn.functional.embedding_bag nn.functional.interpolate.bilinear "
        "nn.functional.grid_sample nn.functional.dropout bernoulli histogram as_strided _segment_reduce.lengths unique"
    ),
    "bfloat16": "add div.no_rounding_mode exp mean softmax matmul nn.functional.gelu nn.functional.layer_norm cumsum",
    "int64": "add floor_divide remainder sum prod sort bitwise_xor index_select searchsorted masked_select",
    "complex64": "mul abs matmul fft.fft linalg.eig sum",
    "bool": "logical_and any cat nonzero",
    "float64": "lgamma linalg.cholesky nn.functional.ctc_loss",
}
OTHERS = {
    "grad": "mul cumprod linalg.inv nn.functional.conv1d nn.functional.batch_norm nn.functional.max_pool1d gather norm",
    "forward_grad": "mul matmul sin",
    "out": "add amax matmul sort",
    "inplace": "add clamp masked_fill index_add",
    "noncontig": "mul matmul sum nn.functional.conv2d",
    "errors": "gather cat index_select multinomial",
    "views": "transpose split diagonal unfold",
    "foreach": "_foreach_add",
    "reductions": "amax",
    "func": "asin matmul",
    "masked": "MaskedTensor.sum",
    "modules": "nn.Linear nn.LSTM",
    "optims": "AdamW.forloop AdamW.fused SGD.foreach",
}
CASES = [("ops", e, d) for d, names in FORWARD.items() for e in names.split()]
CASES += [(s, e, "float32") for s, names in OTHERS.items() for e in names.split()]


@pytest.fixture(scope="module", autouse=True)
def known_tasks() -> None:
    """Every task of the slice exists: a renamed entry must not shrink it silently."""
    suites = SUITES()
    for suite, entry, dtype in CASES:
        assert (entry, dtype) in suites[suite].tasks(), (suite, entry, dtype)


@pytest.mark.parametrize(("suite", "entry", "dtype"), CASES, ids=lambda x: x)
def test_slice(suite: str, entry: str, dtype: str) -> None:
    """The entry's first samples agree with PyTorch CPU and run on the device."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        record = run_task(suite, entry, dtype, 4)
    finally:
        torch.set_num_threads(threads)
    assert record["status"] in ("pass", "host"), record
    assert record["cases"] > record.get("skipped", 0), record
