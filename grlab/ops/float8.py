"""Streams stored in float8_e4m3fn, with a scale for each token and stream.

The values of a stored stream are kept in float32 between a write and the next read of the same layer, exactly those
that the eight bits and the scale hold; `pack` gives the eight bits. The report on GR stores its streams in FP8 and
publishes neither scale nor rounding (arXiv 2608.30320, section 2.2); these are this project's choice.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

E4M3 = jnp.float8_e4m3fn
LARGEST = 448.0  # of e4m3
_SMALLEST_NORMAL = 2.0**-6
_SUBNORMAL_STEP = 2.0**-9
_DROPPED = 20  # bits of a float32 mantissa that e4m3 has no room for


class Packed(NamedTuple):
    """A stored stream: `bits` [..., N, D] of e4m3 and `scale` [..., N, 1] in float32; a value is their product.

    The bits are uint8: XLA on a CPU has no copies of e4m3, so that every layer would convert the bits of all layers.
    """

    bits: jax.Array
    scale: jax.Array


def scale_of(x: jax.Array) -> jax.Array:
    """The smallest power of two by which the values along the last axis lie within e4m3's range; 1 where all are zero.

    A power of two costs no bit of a floating-point format, and makes packing what is stored exact.
    """
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    exponent = jax.lax.bitcast_convert_type(largest, jnp.uint32) & jnp.uint32(0x7F800000)
    scale = jax.lax.bitcast_convert_type(exponent, jnp.float32) * 2.0**-8  # 2^⌊log2 largest⌋ / 2^8: exact, unlike exp2
    scale = jnp.where(largest > LARGEST * scale, 2 * scale, scale)
    return jnp.where(scale > 0, scale, 1.0)


@jax.custom_vjp
def store(x: jax.Array, noise: jax.Array | None) -> jax.Array:
    """float32 `x` as the stored stream holds it; the gradient passes straight through.

    Without noise it is rounded to the nearest, ties to even. With noise, of `noise`, stochastically: up with the
    probability of the distance, so that a sum of many roundings does not drift.
    """
    scale = scale_of(x)
    if noise is not None:
        return _stochastic(x / scale, noise) * scale
    bits = jax.lax.optimization_barrier((x / scale).astype(E4M3))  # or a compiler may drop the two conversions
    return bits.astype(jnp.float32) * scale


store.defvjp(lambda x, noise: (store(x, noise), None), lambda _, cotangent: (cotangent, None))


def noise(stored: jax.Array, k: jax.Array | int) -> jax.Array:
    """32 random bits for each value of the stream that is about to be written by site k.

    They are a hash of what the stream [B, .., D] holds, of the place in its sequence and of k: a training step stays a
    function of its inputs, a layer that is computed again rounds as it did (a hash of the new value would change with
    its last bit), and a sequence is rounded alike in any batch.
    """
    bits = jax.lax.bitcast_convert_type(stored, jnp.uint32)
    place = jax.lax.iota(jnp.uint32, math.prod(stored.shape[1:])).reshape(stored.shape[1:])
    return _hash(_hash(_hash(bits) + place) + jnp.asarray(k).astype(jnp.uint32))


def pack(stored: jax.Array) -> Packed:
    """The bits of a stream that `store` returned; nothing is lost."""
    scale = scale_of(stored)
    return Packed(jax.lax.bitcast_convert_type((stored / scale).astype(E4M3), jnp.uint8), scale)


def unpack(packed: Packed) -> jax.Array:
    """The stored stream in float32."""
    return jax.lax.bitcast_convert_type(packed.bits, E4M3).astype(jnp.float32) * packed.scale


def _stochastic(x: jax.Array, noise: jax.Array) -> jax.Array:
    """`x` within ±448 at one of its two neighbours in e4m3."""
    # Adding noise below the bits that stay, then dropping what is below: up with the probability of the remainder.
    dropped = jnp.uint32(2**_DROPPED - 1)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    normal = jax.lax.bitcast_convert_type((bits + (noise & dropped)) & ~dropped, jnp.float32)
    uniform = (noise >> 8).astype(jnp.float32) * 2.0**-24
    subnormal = jnp.floor(x / _SUBNORMAL_STEP + uniform) * _SUBNORMAL_STEP
    return jnp.where(jnp.abs(x) < _SMALLEST_NORMAL, subnormal, normal)


def _hash(x: jax.Array) -> jax.Array:
    """MurmurHash3's finaliser: each bit of the result depends on every bit of x."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
