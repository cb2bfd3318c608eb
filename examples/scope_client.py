"""Generate a text and look for heads that attend to the token before: python examples/scope_client.py ADDRESS [TOKEN]

ADDRESS is what `megatronapp ui JOB --print` prints. A token of the job takes the place of the code in it.
"""

import sys

import numpy as np

from megatronapp.scope import connect


def main(address: str, token: str | None = None) -> None:
    """Print what a model generates, what its layers predict, and its strongest previous-token head."""
    with connect(address, token) as scope:
        run = scope.generate("def add(a, b):", tokens=8, temperature=0)
        print("generated:", repr(run.texts[0]))
        lens = run.lens(top=1)
        for layer, texts in zip(lens.layers, lens.top_texts, strict=True):
            print(f"layer {layer} predicts", texts)
        scores = run.head_scores()["previous"]
        layer, head = map(int, np.unravel_index(np.nanargmax(scores), scores.shape))
        attention = run.attention(layer, head)
        print(f"layer {layer}, head {head}: {scores[layer, head]:.2f} to the token before, map {attention.shape}")
        attribution = run.attribution()
        total = attribution.heads.sum() + attribution.mlp.sum() + attribution.embedding + attribution.constant
        total += attribution.attention_bias.sum() + attribution.mlp_bias.sum()
        print(f"logit {attribution.logit:.3f}, sum of its contributions {total:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
