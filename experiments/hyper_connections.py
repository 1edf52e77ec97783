"""The table of the Hyper-Connections paper: static and dynamic, with and without tanh, n, frozen parts, AltUp.

    python launch.py sweep --experiment=experiments/hyper_connections.py --scale=cpu --seeds=3 --runs=runs/hc
    python launch.py table --experiment=experiments/hyper_connections.py --runs=runs/hc

All rows are trained at pre-norm's learning rate: HC starts as the pre-norm network.
"""

from grlab.experiment import Experiment, Row, switches


def _published(loss: float, average: float | None = None) -> dict[str, float]:
    return {"loss": loss} | ({} if average is None else {"average": average})


EXPERIMENT = Experiment(
    name="hyper_connections",
    title="Hyper-Connections and their parts",
    baseline="prenorm",
    rows=(
        Row("prenorm", "configs/prenorm.py", "Pre-norm", {}, _published(2.811, 62.5)),
        Row("shc_2", "configs/hc_static.py", "static, n = 2", switches(streams=2), _published(2.799, 63.4)),
        Row("shc_4", "configs/hc_static.py", "static, n = 4", switches(streams=4), _published(2.791, 63.6)),
        Row("dhc_1", "configs/hc.py", "dynamic, n = 1", switches(streams=1), _published(2.819, 62.3)),
        Row("dhc_2", "configs/hc.py", "dynamic, n = 2", switches(streams=2), _published(2.802, 63.0)),
        Row("dhc_4", "configs/hc.py", "dynamic, n = 4", switches(streams=4), _published(2.781, 63.8)),
        Row("dhc_8", "configs/hc.py", "dynamic, n = 8", switches(streams=8), _published(2.778, 62.8)),
        Row("dhc_4_linear", "configs/hc.py", "n = 4, no tanh", switches(tanh=False), _published(2.779, 64.4)),
        Row(
            "dhc_4_no_width",
            "configs/hc.py",
            "n = 4, width connections frozen",
            switches(read="frozen", mix="frozen"),
            _published(2.802),
        ),
        Row("dhc_4_no_b", "configs/hc.py", "n = 4, B frozen", switches(write="frozen"), _published(2.783)),
        Row("identity_hc", "configs/identity_hc.py", "n = 4, H_res = I"),
        # By layers: with two blocks that alternate by sublayer, one would be attention's and the other the FFN's.
        Row("altup_2", "configs/altup.py", "AltUp, K = 2", switches(select="layers"), _published(2.827, 62.4)),
    ),
    source="arXiv 2409.19606, OLMo-1B, 500B tokens: V2 loss and average accuracy",
    notes=(
        "Published losses are of another model, tokenizer and corpus: compare signs and order, not levels.",
        "All rows are trained at pre-norm's learning rate.",
        "The paper scales the initial output projections of HC by √n and does not say which way; here they are as "
        "pre-norm's, so that HC starts as pre-norm (residual.output_init has both ways).",
    ),
)
