"""The gradient of Dirichlet samples, by PyTorch's own approximations: how a Beta quantile moves with its parameter."""

from __future__ import annotations

import jax.numpy as jnp
from jax.scipy.special import digamma

from torchtpu.lowering.registry import lowering

# The coefficients of PyTorch's rational correction (ATen/native/Distributions.h): numerator and denominator, by powers
# of log(x), of log(alpha / x), and of the rest.
_RATIONAL = (
    (
        (
            (1.003668233, -0.01061107488, -0.0657888334, 0.01201642863),
            (0.6336835991, -0.3557432599, 0.05486251648, -0.001465281033),
            (-0.03276231906, 0.004474107445, 0.002429354597, -0.0001557569013),
        ),
        (
            (0.221950385, -0.3187676331, 0.01799915743, 0.01074823814),
            (-0.2951249643, 0.06219954479, 0.01535556598, 0.001550077057),
            (0.02155310298, 0.004170831599, 0.001292462449, 6.976601077e-05),
        ),
        (
            (-0.05980841433, 0.008441916499, 0.01085618172, 0.002319392565),
            (0.02911413504, 0.01400243777, -0.002721828457, 0.000751041181),
            (0.005900514878, -0.001936558688, -9.495446725e-06, 5.385558597e-05),
        ),
    ),
    (
        (
            (1, -0.02924021934, -0.04438342661, 0.007285809825),
            (0.6357567472, -0.3473456711, 0.05454656494, -0.002407477521),
            (-0.03301322327, 0.004845219414, 0.00231480583, -0.0002307248149),
        ),
        (
            (0.5925320577, -0.1757678135, 0.01505928619, 0.000564515273),
            (0.1014815858, -0.06589186703, 0.01272886114, -0.0007316646956),
            (-0.007258481865, 0.001096195486, 0.0003934994223, -4.12701925e-05),
        ),
        (
            (0.06469649321, -0.0236701437, 0.002902096474, -5.896963079e-05),
            (0.001925008108, -0.002869809258, 0.0008000589141, -6.063713228e-05),
            (-0.0003477407336, 6.959756487e-05, 1.097287507e-05, -1.650964693e-06),
        ),
    ),
)


def _near_zero(x, alpha, beta):
    """Taylor series of the gradient by ``alpha`` where x is close to 0."""
    factor = digamma(alpha) - digamma(alpha + beta) - jnp.log(x)
    power = jnp.ones_like(x)
    series = power / alpha * (factor + 1 / alpha)
    for i in range(1, 11):
        power = power * (i - beta) * x / i
        series = series + power / (alpha + i) * (factor + 1 / (alpha + i))
    return jnp.nan_to_num(x * (1 - x) ** -beta * series, posinf=jnp.inf, neginf=-jnp.inf)


def _near_one(x, alpha, beta):
    """Taylor series of the gradient by ``beta`` where x is close to 0; seen from the other end, that by ``alpha``."""
    factor = digamma(alpha + beta) - digamma(beta)
    power = products = jnp.ones_like(x)
    derivative, series = jnp.zeros_like(x), factor / alpha
    for i in range(1, 9):
        power = power * -x / i
        derivative, products = derivative * (beta - i) + products, products * (beta - i)
        series = series + power / (alpha + i) * (derivative + factor * products)
    return jnp.nan_to_num(-((1 - x) ** (1 - beta)) * series, posinf=jnp.inf, neginf=-jnp.inf)


def _large(x, alpha, beta):
    """Saddle point expansion where both parameters are large; a polynomial around its singularity at the mean."""
    total = alpha + beta
    mean = alpha / total
    std = jnp.sqrt(alpha * beta / (total + 1)) / total
    inner = (453 + 1620 * beta * (1 - x) - 455 * x) * beta + alpha * (8 * (1 - x) * (135 * beta - 11))
    inner = 3 * (59 + 180 * beta - 90 * x) * beta**2 + alpha * inner
    poly = 47 * x * beta**4 + alpha * ((43 + 20 * (16 + 27 * beta) * x) * beta**3 + alpha * inner)
    around = (1 + 12 * alpha) * (1 + 12 * beta) / total**2 / (1 - x) * poly
    around = around / (12960 * alpha**3 * beta**2 * (1 + 12 * total))

    def stirling(n):
        return 1 + 1 / (12 * n) + 1 / (288 * n**2)

    axbx = alpha * (x - 1) + beta * x
    first = (2 * alpha**2 * (x - 1) + alpha * beta * (x - 1) - x * beta**2) / (
        jnp.sqrt(2 * alpha / beta) * total**1.5 * axbx**2
    )
    third = jnp.sqrt(8 * alpha * beta / total) / axbx
    base = beta * jnp.log(beta / (total * (1 - x))) + alpha * jnp.log(alpha / (total * x))
    fourth = jnp.where(x < mean, 1, -1) * base**-1.5
    expansion = first + 0.5 * jnp.log(alpha / (total * x)) * (third + fourth)
    far = stirling(alpha) * stirling(beta) / stirling(total) * -x / jnp.sqrt(2 * alpha * beta / total) * expansion
    return jnp.where(jnp.abs(x - mean) <= 0.1 * std, around, far)


def _otherwise(x, alpha, beta):
    """A rational correction of an analytic approximation."""
    u = jnp.log(x)
    a = jnp.log(alpha) - u
    b = jnp.log(alpha + beta) - a

    def polynomial(coefficients):
        return sum(
            u**i * a**j * (c[0] + b * (c[1] + b * (c[2] + b * c[3])))
            for i, row in enumerate(coefficients)
            for j, c in enumerate(row)
        )

    approximation = x * (digamma(alpha + beta) - digamma(alpha)) / beta
    return polynomial(_RATIONAL[0]) / polynomial(_RATIONAL[1]) * approximation


@lowering("_dirichlet_grad")
def dirichlet_grad(x, alpha, total):
    """-(dF/dalpha) / f / (1 - x) for the Beta distribution of (alpha, total - alpha)."""
    dtype = x.dtype
    # The expansions lose digits to cancellation: PyTorch CPU computes them in float64 as well.
    x, alpha, total = (y.astype(jnp.float64) for y in (x, alpha, total))
    beta = total - alpha
    boundary = total * x * (1 - x)
    cases = [
        ((x <= 0.5) & (boundary < 2.5), _near_zero(x, alpha, beta)),
        ((x >= 0.5) & (boundary < 0.75), -_near_one(1 - x, beta, alpha)),
        ((alpha > 6) & (beta > 6), _large(x, alpha, beta)),
    ]
    where, values = zip(*cases, strict=True)
    return jnp.select(where, values, _otherwise(x, alpha, beta)).astype(dtype)
