"""DeepNorm: LayerNorm(α x + F(x)), with α and the initial values set by the depth. arXiv 2203.00555."""

from grlab.residual.postnorm import PostNorm, PostNormSite


def alpha(layers: int) -> float:
    """The weight of the stream in a decoder of M layers: (2M)^¼   (DeepNorm, Figure 2)."""
    return (2 * layers) ** 0.25


def beta(layers: int) -> float:
    """The gain of the initial values of the FFN, value and output projections: (8M)^−¼   (DeepNorm, Figure 2)."""
    return (8 * layers) ** -0.25


class DeepNorm(PostNorm, kind="deepnorm"):
    """Post-norm with α, and Xavier-normal initial values with gain β; query and key have gain 1.

    All matrices of the gated FFN (gate, up, down) have gain β; the paper's FFN is not gated.
    """

    def site(self, k, key):
        del k
        return PostNormSite(self.switches, self.frame, alpha(self.frame.sites // 2), key)

    def initial_std(self, matrix, fan_in, fan_out, std):
        del std
        gain = 1.0 if matrix in ("query", "key") else beta(self.frame.sites // 2)
        return gain * (2 / (fan_in + fan_out)) ** 0.5
