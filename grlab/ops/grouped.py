"""Products of the rows of one array with the matrix of each row's group: the experts of a mixture.

Dimensions: R rows, sorted by group; E groups; I and O channels; M rows of a block.
"""

import jax
import jax.numpy as jnp

BLOCK = 32  # rows of a block on a CPU: of 16, 32 and 64 the fastest at the widths of the scale cpu_hybrid


@jax.custom_vjp
def grouped_matmul(x_RxI: jax.Array, w_ExIxO: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """x[r] @ w[e] for each row r of group e: [R, O] in the dtype of x, accumulated in float32.

    `sizes_E` (int32) says how many rows each group has, one group's after the other's; they sum to R. It is
    `jax.lax.ragged_dot` but on a CPU, where XLA's multiplies every row with the matrix of every group. There the rows
    of each group are laid out in blocks of M, and a block is multiplied with one matrix.
    """
    return jax.lax.platform_dependent(x_RxI, w_ExIxO, sizes_E, cpu=_by_blocks, default=_ragged)


def _forward(x_RxI, w_ExIxO, sizes_E):
    return grouped_matmul(x_RxI, w_ExIxO, sizes_E), (x_RxI, w_ExIxO, sizes_E)


def _backward(kept, dout_RxO):
    x_RxI, w_ExIxO, sizes_E = kept
    dx_RxI = grouped_matmul(dout_RxO, jnp.swapaxes(w_ExIxO, 1, 2), sizes_E)
    dw_ExIxO = jax.lax.platform_dependent(x_RxI, dout_RxO, sizes_E, cpu=_weights_by_blocks, default=_weights_ragged)
    return dx_RxI, dw_ExIxO.astype(w_ExIxO.dtype), None


grouped_matmul.defvjp(_forward, _backward)


def _ragged(x_RxI, w_ExIxO, sizes_E):
    return jax.lax.ragged_dot(x_RxI, w_ExIxO, sizes_E, preferred_element_type=jnp.float32).astype(x_RxI.dtype)


def _weights_ragged(x_RxI, dout_RxO, sizes_E):
    """Σ_r x[r]ᵀ dout[r] over the rows of each group: [E, I, O] in float32."""
    dimensions = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    return jax.lax.ragged_dot_general(x_RxI, dout_RxO, sizes_E, dimensions, preferred_element_type=jnp.float32)


def _blocks(sizes_E, rows: int):
    """(group of each block, the row in each place of the blocks [blocks, M], the place of each row [R]).

    A group's rows fill blocks from the start of one; the last of its blocks may have places that no row is in: `rows`.
    """
    blocks_E = -(-sizes_E // BLOCK)
    last_E, end_E = jnp.cumsum(blocks_E), jnp.cumsum(sizes_E)
    first_E, start_E = last_E - blocks_E, end_E - sizes_E
    block_B = jnp.arange(-(-rows // BLOCK) + len(sizes_E))  # as many as there can be
    group_B = jnp.minimum(jnp.searchsorted(last_E, block_B, side="right"), len(sizes_E) - 1)
    row_BxM = (start_E[group_B] + (block_B - first_E[group_B]) * BLOCK)[:, None] + jnp.arange(BLOCK)
    row_BxM = jnp.where(row_BxM < end_E[group_B][:, None], row_BxM, rows)
    row_R = jnp.arange(rows)
    group_R = jnp.searchsorted(end_E, row_R, side="right")
    return group_B, row_BxM, first_E[group_R] * BLOCK + row_R - start_E[group_R]


def _fill(x_RxI, row_BxM):
    return jnp.take(x_RxI, row_BxM, axis=0, mode="fill", fill_value=0)


def _by_blocks(x_RxI, w_ExIxO, sizes_E):
    group_B, row_BxM, place_R = _blocks(sizes_E, len(x_RxI))

    def product(block):
        x_MxI, group = block
        return jnp.dot(x_MxI, w_ExIxO[group], preferred_element_type=jnp.float32).astype(x_RxI.dtype)

    out_BxMxO = jax.lax.map(product, (_fill(x_RxI, row_BxM), group_B))
    return out_BxMxO.reshape(-1, w_ExIxO.shape[2])[place_R]


def _weights_by_blocks(x_RxI, dout_RxO, sizes_E):
    group_B, row_BxM, _ = _blocks(sizes_E, len(x_RxI))

    def add(dw_ExIxO, block):
        x_MxI, dout_MxO, group = block
        return dw_ExIxO.at[group].add(jnp.dot(x_MxI.T, dout_MxO, preferred_element_type=jnp.float32)), None

    zeros = jnp.zeros((len(sizes_E), x_RxI.shape[1], dout_RxO.shape[1]), jnp.float32)
    return jax.lax.scan(add, zeros, (_fill(x_RxI, row_BxM), _fill(dout_RxO, row_BxM), group_B))[0]
