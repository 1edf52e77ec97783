"""The weights of a residual system by depth: ranges of gains, biases and scales, norms of the gates' projections."""

from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from grlab.interop.hf import import_residual
from grlab.params import Fixed
from grlab.residual.stream import Residual, Site

GAINS = ("gain", "source_gain", "dyn_gain")  # zero-centred: the scale is 1 + gain


def of_checkpoint(path: str | Path) -> str:
    """The table of a public checkpoint, of which its residual part alone is read; UsageError where it has none."""
    part = import_residual(path)
    title = f"{type(part.system).__name__}, {part.system.n_streams} streams, {len(part.sites)} sites"
    return f"{title}\n{table(part.system, part.sites)}"


def table(system: Residual, sites: list[Site]) -> str:
    """A line for each site, and one for the end of the stream.

    A matrix is given by its Frobenius norm; everything else by its least and its largest value, gains as the scale that
    they are, 1 + gain.
    """
    names = [f"{k // 2} {'ffn' if k % 2 else 'mixer'}" for k in range(len(sites))]
    rows = dict(zip(names, map(summary, sites), strict=True)) | {"end": summary(system)}
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    cells = [["site", *columns]]
    cells += [[name, *(row.get(column, "") for column in columns)] for name, row in rows.items()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


def summary(module: nnx.Module) -> Mapping[str, str]:
    """{what is given of a parameter: its value} of a site, or of the end of a stream."""
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        if isinstance(variable, Fixed):
            continue
        name, value = path[-1], np.asarray(jax.device_get(variable.get_value()), np.float64)
        name = "norm" if path[-2:] in (("norm", "gain"), ("final_norm", "gain")) else name
        if value.ndim >= 2 and name.startswith(("w_", "phi_")):
            found[f"|{name}|"] = f"{np.linalg.norm(value):.3g}"
        else:
            value = value + 1 if path[-1] in GAINS else value
            shown = f"{value:.3g}" if value.ndim == 0 else f"{value.min():.3g} … {value.max():.3g}"
            found[f"1 + {name}" if path[-1] in GAINS and name != "norm" else name] = shown
    return found
