"""Floating-point operations a token, as the table and MFU count them."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from grlab.model import Decoder, check
from grlab.ops import tpu

_ELEMENTWISE = frozenset(
    "add sub mul div rem max min neg abs sign square sqrt rsqrt pow integer_pow exp exp2 log log1p tanh logistic erf "
    "sin cos floor select_n clamp add_any cumsum cummax".split()
)
_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min argmax argmin".split())


def per_token(config: ConfigDict, vocab: int) -> float:
    """Training FLOPs a token: 3 × the forward pass, with half of the attention products, the connection's included.

    Causal attention needs half of the T × T products that the program computes: that half is taken off. A sparse
    attention's are counted like a dense one's, which is how they are computed. Recomputation (remat) is not work and
    not counted. A multiplication and an addition are two operations.
    """
    model = config.model
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(model, config.residual, vocab, jax.random.key(0))))
    tokens_BxT = jax.ShapeDtypeStruct((1, config.seq_len), jnp.int32)
    with tpu.without_kernels():  # of which a program says what one block does
        forward = of_jaxpr(jax.make_jaxpr(lambda p, t: nnx.merge(graphdef, p)(t))(params, tokens_BxT).jaxpr)
    # q kᵀ and weights · v: 2 · 2 operations for each head, channel and pair of positions, half of them masked.
    pattern, _ = check(model)
    attentions = model.layers * sum(mixer != "gdn" for mixer in pattern) / len(pattern)
    masked = 2 * model.heads * model.head_dim * config.seq_len * attentions
    return 3 * (forward / config.seq_len - masked)


def of_jaxpr(jaxpr) -> float:
    """The operations on floating-point numbers of a program, those of a loop's body as often as it runs.

    Of a choice between programs, such as one for each device, it is the least: the work that has to be done.
    """
    return sum(_of_equation(equation) for equation in jaxpr.eqns)


def _of_equation(equation) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return params["length"] * of_jaxpr(params["jaxpr"].jaxpr)
    if name == "cond":
        return min(of_jaxpr(branch.jaxpr) for branch in params["branches"])
    inner = [p for p in jax.tree.leaves(list(params.values())) if hasattr(p, "eqns") or hasattr(p, "jaxpr")]
    if inner:
        return sum(of_jaxpr(getattr(p, "jaxpr", p)) for p in inner)
    shapes = [v.aval.shape for v in equation.invars]
    out = equation.outvars[0].aval
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * math.prod(out.shape) * math.prod(shapes[0][axis] for axis in contracted)
    if name == "ragged_dot_general":
        return 2 * math.prod(shapes[0]) * out.shape[-1]  # each row with one matrix
    if not jnp.issubdtype(out.dtype, jnp.floating):
        return 0
    if name in _ELEMENTWISE:
        return math.prod(out.shape)
    return math.prod(shapes[0]) if name in _REDUCTIONS else 0
