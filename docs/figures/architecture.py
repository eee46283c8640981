"""Draws the blocks of Kimi Linear: `python docs/figures/architecture.py` writes architecture.png beside itself."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

KDA, MLA, MLP, PLAIN = "#cfe3f5", "#f7d9c4", "#d9ecd3", "#eeeeee"


def box(ax, x, y, w, h, text, color=PLAIN, size=9):
    ax.add_patch(
        FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0.02,rounding_size=0.08", fc=color, ec="#555555", lw=0.8)
    )
    ax.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=size)


def arrow(ax, x0, y0, x1, y1):
    ax.annotate("", (x1, y1), (x0, y0), arrowprops={"arrowstyle": "-|>", "lw": 0.8, "color": "#555555"})


def model(ax):
    ax.set_title("Kimi Linear", fontsize=11)
    rows = [
        "embedding",
        "KDA, dense MLP",
        "KDA, experts",
        "KDA, experts",
        "MLA, experts",
        "... KDA KDA KDA MLA ...",
        "norm, output head",
    ]
    colors = [PLAIN, KDA, KDA, KDA, MLA, PLAIN, PLAIN]
    for i, (text, color) in enumerate(zip(rows, colors, strict=True)):
        box(ax, 0.3, i * 0.8, 2.4, 0.55, text, color)
        if i:
            arrow(ax, 1.5, i * 0.8 - 0.25, 1.5, i * 0.8)


def kda(ax):
    ax.set_title("Kimi Delta Attention", fontsize=11)
    box(ax, 0, 0, 5.2, 0.5, "x")
    for i, name in enumerate(("query", "key", "value")):
        x = i * 0.85
        arrow(ax, x + 0.38, 0.5, x + 0.38, 0.8)
        box(ax, x, 0.8, 0.77, 0.5, f"{name}\nprojection", size=7)
        arrow(ax, x + 0.38, 1.3, x + 0.38, 1.55)
        box(ax, x, 1.55, 0.77, 0.5, "conv 4\nSiLU", KDA, size=7)
        arrow(ax, x + 0.38, 2.05, x + 0.38, 2.75)
    for i, (name, form) in enumerate((("decay", "-exp(a) softplus"), ("beta", "sigmoid"), ("gate", "sigmoid"))):
        x = 2.6 + i * 0.9
        arrow(ax, x + 0.4, 0.5, x + 0.4, 0.8)
        box(ax, x, 0.8, 0.82, 0.5, f"{name}\nprojection", size=7)
        arrow(ax, x + 0.4, 1.3, x + 0.4, 1.55)
        box(ax, x, 1.55, 0.82, 0.5, form, size=6.5)
        arrow(ax, x + 0.4, 2.05, x + 0.4, 2.75 if i < 2 else 3.55)
    ax.text(0.8, 2.35, "unit length (q, k)", fontsize=7, ha="center", style="italic")
    box(
        ax,
        0,
        2.75,
        4.3,
        0.55,
        r"$S_t=(I-\beta_t k_t k_t^\top)\,\mathrm{diag}(e^{g_t})\,S_{t-1}+\beta_t k_t v_t^\top$",
        KDA,
    )
    arrow(ax, 2.1, 3.3, 2.1, 3.55)
    box(ax, 0, 3.55, 5.2, 0.5, r"RMSNorm per head of $S_t^\top q_t/\sqrt{d}$,  times gate")
    arrow(ax, 2.6, 4.05, 2.6, 4.3)
    box(ax, 0, 4.3, 5.2, 0.5, "output projection")


def mla(ax):
    ax.set_title("Latent attention", fontsize=11)
    box(ax, 0, 0, 3, 0.5, "x")
    arrow(ax, 0.7, 0.5, 0.7, 0.8)
    box(ax, 0, 0.8, 1.4, 0.5, "query projection", size=7)
    arrow(ax, 2.3, 0.5, 2.3, 0.8)
    box(ax, 1.6, 0.8, 1.4, 0.5, "down projection", size=7)
    arrow(ax, 2.3, 1.3, 2.3, 1.55)
    box(ax, 1.6, 1.55, 1.4, 0.5, "latent (cached)", MLA, size=8)
    arrow(ax, 2.3, 2.05, 2.3, 2.3)
    box(ax, 1.6, 2.3, 1.4, 0.5, "keys, values\nper head", size=7)
    arrow(ax, 0.7, 1.3, 0.7, 3.05)
    arrow(ax, 2.3, 2.8, 2.3, 3.05)
    box(ax, 0, 3.05, 3, 0.5, "causal softmax attention", MLA)
    arrow(ax, 1.5, 3.55, 1.5, 3.8)
    box(ax, 0, 3.8, 3, 0.5, "output projection")


def main():
    figure, axes = plt.subplots(1, 3, figsize=(13, 5), width_ratios=(3, 5.4, 3.2))
    for ax, draw in zip(axes, (model, kda, mla), strict=True):
        draw(ax)
        ax.set_aspect("equal")
        ax.autoscale_view()
        ax.axis("off")
    figure.tight_layout()
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
