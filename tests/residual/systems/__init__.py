"""What each residual system computes, a module a `residual.kind`, stated once more from its paper in float64 NumPy.

A module is found by being there and defines

    CASES                                     switches (`config.residual` less kind) to hold against the statement
    site(p, stream, y, *, k, eps, **switches) -> (x, new stream): the connection of sublayer k
    collapse(p, stream, *, eps, **switches)   -> x: the end of the model
    expand(x, **switches)                     -> the stream that the embedding x starts
    start(model, tokens)                      -> (logits, tolerance): what the row is at step 0

`p` is a dict of float64 arrays under the names of the module's parameters, weight matrices [in, out], norm gains
zero-centred (the scale is 1 + gain). y is an argument of its own rather than a function of x, so that a gradient with
respect to x and one to the new stream are separate. Optional: SITES, the sublayers k to try (1 by default); LAYERS.
"""

import importlib
import pkgutil

ALL = {m.name: importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)}
