"""Recipes of perturbations: their digests, and the place and correction that each mistake is reported with."""

import json
from typing import Any

import pytest

from megatronapp_common.scope.perturbation.recipe import Recipe, RecipeError, parse_recipe

NOISE = {"type": "gaussian", "coefficient": 0.1}


def recipe(**perturbation: Any) -> dict[str, Any]:
    return {"perturbations": [{"kind": "calculation", "site": "mlp2", "action": NOISE} | perturbation]}


def test_the_digest_names_the_meaning_and_not_the_spelling() -> None:
    plain = parse_recipe(recipe())
    spelled = parse_recipe({"version": 1, "seed": 0, **recipe(tensor="weight", layers=None)})
    assert plain == spelled
    assert plain.digest == spelled.digest == "23a747c93d44"
    assert parse_recipe(json.loads(plain.canonical())).digest == plain.digest
    assert parse_recipe({"seed": 1, **recipe()}).digest != plain.digest
    assert parse_recipe(recipe(layers=[0, 1])).digest == parse_recipe(recipe(layers=[1, 0, 1])).digest


PATCH = {"type": "patch", "source": {"tokens": [1, 2]}}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "the body: must be an object"),
        ({}, "perturbations: must be given"),
        ({"perturbations": []}, "perturbations is empty; write at least one"),
        ({"version": 2, **recipe()}, "version: must be 1"),
        (recipe(kind="weights"), "perturbations.0.kind: must be 'storage', 'calculation' or 'system'"),
        (recipe(action={"type": "noise1", "coefficient": 1}), "perturbations.0.action.type: noise1 of MegatronApp"),
        (recipe(action={"type": "gaussian"}), "perturbations.0.action: coefficient must be given for gaussian"),
        (recipe(action={"type": "zero", "coefficient": 1}), "perturbations.0.action: coefficient means nothing for"),
        (recipe(action={"type": "mean"}), "perturbations.0.action: one of value, values and over must be given"),
        (recipe(action={"type": "patch"}), "perturbations.0.action: source must be given for patch"),
        (
            recipe(action=PATCH | {"source": {}}),
            "perturbations.0.action.source: one of prompt and tokens must be given",
        ),
        (recipe(action=PATCH, steps={}), "perturbations.0: steps means nothing for patch"),
        (
            recipe(action=PATCH, positions=[{"origin": "promptEnd"}]),
            "perturbations.0: positions.0: patch changes tokens",
        ),
        (recipe(action={"type": "bitFlip", "bits": "sign", "rate": 1}), "action.type bitFlip is not possible for calc"),
        (recipe(site=None), "perturbations.0: site must be given for calculation"),
        (recipe(parameter="mlp.linear_fc1"), "perturbations.0: parameter means nothing for calculation"),
        (recipe(tensor="bias"), "perturbations.0: tensor means nothing for calculation"),
        (recipe(kind="system"), "perturbations.0: site means nothing for system"),
        (recipe(kind="storage"), "perturbations.0: site means nothing for storage"),
        (recipe(layers=[]), "perturbations.0.layers: must have at least 1 elements"),
        (recipe(layers=[-1]), "perturbations.0.layers.0: must be 0 or more"),
        (recipe(positions=[{"first": -1}]), "perturbations.0.positions.0: first is -1, before the first token"),
        (recipe(positions=[{"first": 3, "end": 3}]), "perturbations.0.positions.0: end 3 is not above first 3"),
        (recipe(steps={"first": 2, "end": 1}), "perturbations.0.steps: end 1 is not above first 2"),
        (recipe(action={"type": "mean", "over": "prompt"}, positions=[{}]), "perturbations.0: positions: the mean"),
        (recipe(noise=1), "perturbations.0.noise: there is no such field"),
    ],
)
def test_mistakes_are_reported_with_their_place(document: Any, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(document)
    assert message in str(caught.value)


def test_a_recipe_of_each_kind_survives_its_canonical_form() -> None:
    recipe_of_all = Recipe.model_validate(
        {
            "seed": 3,
            "perturbations": [
                {"kind": "storage", "parameter": "self_attention.linear_qkv", "part": "key", "action": NOISE},
                {"kind": "calculation", "site": "q", "heads": [1], "action": {"type": "mean", "values": [0.5, 1]}},
                {"kind": "system", "positions": [{"origin": "promptEnd", "first": -1}], "action": NOISE},
            ],
        }
    )
    assert parse_recipe(json.loads(recipe_of_all.canonical())) == recipe_of_all
