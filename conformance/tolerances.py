"""Where the comparison differs from PyTorch's defaults, and why: the whole list."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

__all__ = [
    "ANY_EQUAL",
    "CPU_IGNORES_STRIDES",
    "CPU_KEEPS_SIZES",
    "HOST",
    "HOST_ARGUMENTS",
    "NOT_DIFFERENTIATED",
    "NOT_EXPANDED",
    "OVERRIDES",
    "RANDOM",
    "REFERENCE_DTYPES",
    "RENORMALISES",
    "Override",
    "host_reason",
    "is_random",
]

_F32, _F64, _C64, _C128 = torch.float32, torch.float64, torch.complex64, torch.complex128


@dataclass(frozen=True)
class Override:
    """A tolerance of some entries: pattern of full names, dtypes, the reason, and the suites where they are not all."""

    pattern: str
    dtypes: tuple[torch.dtype, ...]
    rtol: float
    atol: float
    reason: str
    suites: tuple[str, ...] = ()

    def matches(self, name: str, suite: str) -> bool:
        """Whether the entry is meant, in this suite (none named: in every suite)."""
        return re.fullmatch(self.pattern, name) is not None and (not self.suites or suite in self.suites)


OVERRIDES: tuple[Override, ...] = (
    Override(r"Muon\..*", (_F32,), 1e-3, 1e-4, "it orthogonalises in bfloat16, which PyTorch CPU rounds more often"),
    Override(
        r"cdist",
        (_F32,),
        1e-3,
        1e-3,
        "a matrix product gives squared distances, so short ones lose digits by cancellation, on the CPU as well",
    ),
    Override(
        r"nn\.functional\.linear_cross_entropy\.chunked.*",
        (torch.bfloat16,),
        0.15,
        1e-2,
        "it rounds after every step, and the logarithm of a sum near 1 makes one unit in the last place of it 10 %",
    ),
    Override(
        r"nn\.functional\.linear_cross_entropy\.chunked.*",
        (torch.float16,),
        2e-2,
        1e-3,
        "as in bfloat16",
    ),
    Override(
        r"nn\.functional\.(interpolate|upsample)\w*(\..*)?",
        (torch.uint8,),
        0,
        1,
        "the CPU computes uint8 in 16-bit fixed point, as PyTorch's own tests allow for",
    ),
    Override(
        r"nn\.CTCLoss|nn\.functional\.ctc_loss",
        (_F32,),
        5e-3,
        1e-4,
        "log-likelihoods near -150 carry 1e-5 of rounding a step, on the CPU as well",
    ),
    Override(
        r"torch\._scaled_mm",
        (torch.int32,),
        1e-5,
        64,
        "an integer out holds sums in float32 cut to whole numbers: where one is within rounding of a whole number, "
        "either neighbour is right, and terms of 10^7 leave that much rounding where they cancel",
        ("out",),
    ),
    Override(
        r"nn\.functional\.poisson_nll_loss",
        (_F32,),
        1e-5,
        1e-4,
        "of integers, it adds terms that reach 8,000 to a mean near 10",
        ("ops",),
    ),
    Override(
        r"(linalg\.)?svd",
        (_C64,),
        1e-4,
        5e-5,
        "the gradient is divided by differences of singular values",
        ("grad",),
    ),
    Override(
        r"nn\.functional\.multi_head_attention_forward",
        (_F32,),
        3e-5,
        1e-2,
        "its products reach 10^5 and cancel",
        ("noncontig",),
    ),
    Override(
        r"cov",
        (_F32, _C64),
        1e-5,
        5e-4,
        "the gradient of a weight is a difference of sums of 10^3 that cancel, to 0 in the order of the CPU",
        ("grad",),
    ),
    Override(
        r"logcumsumexp",
        (_C64,),
        2e-3,
        1e-3,
        "the gradient is taken through logarithms of sums that nearly cancel: the CPU is 2e-3 from double precision",
        ("grad",),
    ),
    Override(
        r"linalg\.householder_product",
        (_F32,),
        1e-4,
        5e-3,
        "one sample's reflectors are far from orthogonal (1 - tau |v|^2 reaches 14), and the derivative multiplies by "
        "them and by their inverses: what a step rounds grows a thousandfold, on the CPU as well",
        ("forward_grad", "grad"),
    ),
    Override(
        r"nn\.functional\.gaussian_nll_loss",
        (_F32,),
        1e-5,
        2e-4,
        "a sum of 125 terms that reach 1,000 and cancel: XLA:CPU adds them one after another, the CPU in pairs",
        ("forward_grad",),
    ),
    Override(
        r"nn\.functional\.conv_transpose3d",
        (_F32,),
        1e-5,
        5e-5,
        "sums of products that reach 200 and cancel, in another order: the CPU is 2e-5 from double precision, we 5e-5",
        ("forward_grad",),
    ),
    Override(
        r"linalg\.lstsq\.grad_oriented",
        (_F32,),
        1e-5,
        1e-4,
        "the derivative reaches 170 in a matrix of which others are 1: the CPU is 6e-5 from double precision, we 1e-4",
        ("forward_grad",),
    ),
    Override(
        r"grid_sampler_3d",
        (_F32,),
        1e-5,
        1e-3,
        "the gradient of a place sums differences that reach 170: the CPU is 4e-4 from double precision",
        ("grad",),
    ),
    Override(
        r"linalg\.eig",
        (_F32,),
        1e-5,
        2e-5,
        "the gradient is divided by differences of eigenvalues",
        ("grad",),
    ),
)

REFERENCE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.complex32, torch.complex64)
"""Results of these types that differ from the CPU's are judged against the same operator in double precision: PyTorch
CPU rounds some
low precision operators several times where XLA rounds once. Such passes are counted in the report."""

RANDOM = (
    r"(nn\.functional\.)?(feature_|alpha_|feature_alpha_)*dropout[123]?d?",
    r"nn\.functional\.(feature_)?alpha_dropout.*",
    r"bernoulli|multinomial|normal(\..*)?|rand|randn|randint|rand_like|randn_like|randint_like|randperm|uniform|cauchy|exponential|geometric",
    r"log_normal|nn\.functional\.rrelu|nn\.functional\.fractional_max_pool[23]d|svd_lowrank|pca_lowrank",
    r"(new_)?empty(_like|_strided|_permuted)?|resize_(as_)?",
)
"""Entries with random or uninitialised results: shape and dtype are compared with the CPU's; a random one must repeat
with its seed.
"""

HOST = {
    r"linalg\.eig(vals)?|eig": "XLA has no general eigenvalue algorithm for TPU",
    r"linalg\.ldl_.*": "XLA has no symmetric indefinite factorisation",
    r"unique(_consecutive)?(\..*)?": "the size of the result depends on the data",
}
"""Entries computed on the host by design."""

HOST_ARGUMENTS = {"tensor_split": "its indices decide sizes, so PyTorch wants them on the CPU whatever the device"}
"""Entries of which only the first argument moves to the device."""

ANY_EQUAL = {
    "kthvalue": (1, "which of several equal elements is the k-th is open"),
    "mode": (0, "the index is that of an element equal to the mode; the CPU's sort of a long input is not stable"),
    "sort": (0, "equal elements may come in any order unless stable=True"),
    "topk": (1, "which of several equal elements are taken is open"),
}
"""Entries whose indices PyTorch leaves open: the position of ``dim`` among the arguments after the input, and the
reason. Where indices differ, the elements at them are compared.
"""

RENORMALISES = {"nn.functional.embedding": "max_norm", "nn.functional.embedding_bag": "max_norm"}
"""Entries that write an argument in place if an option is given, and refuse one with several elements in one place, as
PyTorch's other operators do; the CPU's kernel does not look."""

CPU_KEEPS_SIZES = ("native_batch_norm",)
"""Entries whose CPU kernel fails on an ``out`` of another size, by a check that is for something else, where PyTorch's
rule is to resize it, as CUDA's does."""

CPU_IGNORES_STRIDES = ("nn.functional.gelu", "narrow_copy", "nn.functional.avg_pool3d")
"""Entries whose CPU kernel writes a strided ``out`` as if it were contiguous: there is no right answer to compare."""

NOT_DIFFERENTIATED = {
    ("renorm", _C64, math.inf): (
        "PyTorch takes the norm in complex128 on every device but CUDA and looks among the absolute values in float32 "
        "for those equal to it; there is none, and the CPU's gradient is NaN where the double-precision one is not"
    ),
}
"""Samples whose gradient PyTorch gets wrong, with the reason: (entry, dtype, first float among the arguments)."""

_RANK = "with all rows alike, rounding decides what the result is"
NOT_EXPANDED = {
    **dict.fromkeys(
        ("geqrf", "qr", "linalg.qr", "pinverse", "linalg.pinv", "linalg.cholesky_ex", "linalg.cholesky"), _RANK
    ),
    **dict.fromkeys(("svd", "linalg.svd"), "with all rows alike, all but one of the singular vectors are arbitrary"),
    **dict.fromkeys(
        ("median", "nanmedian", "masked.median"),
        "with stride 0, the CPU's result is not that of the same elements laid out one by one",
    ),
}
"""Entries that are not run on expanded inputs, with the reason."""


def is_random(name: str) -> bool:
    """Whether an entry's values cannot be compared."""
    return any(re.fullmatch(p, name) for p in RANDOM)


def host_reason(name: str) -> str | None:
    """Why an entry runs on the host, or None."""
    return next((why for pattern, why in HOST.items() if re.fullmatch(pattern, name)), None)
