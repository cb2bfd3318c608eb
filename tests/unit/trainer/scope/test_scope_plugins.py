"""Modules of users that register sites: what a rank says of those that cannot be used."""

import pathlib

import pytest

pytestmark = pytest.mark.torch

GOOD = "from megatronapp_trainer.hooks.sites import register_site\nregister_site('mine', 'mlp')\n"


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "ModuleNotFoundError: No module named 'plugin_of_test'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        (GOOD.replace("mine", "q"), "CaptureError: site 'q': write another name"),
        ("", "no site is registered; call register_site when imported"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_named_with_the_reason(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, text: str | None, message: str
) -> None:
    import sys

    from megatronapp_trainer.errors import UsageError
    from megatronapp_trainer.scope.plugins import load_plugins

    if text is not None:
        (folder / "plugin_of_test.py").write_text(text)
    monkeypatch.delitem(sys.modules, "plugin_of_test", raising=False)
    with pytest.raises(UsageError, match="--scope-plugins plugin_of_test") as caught:
        load_plugins(["plugin_of_test"])
    assert message in str(caught.value)


def test_sites_of_a_plugin_are_known(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from megatronapp_trainer.hooks.sites import forget_site, site_of
    from megatronapp_trainer.scope.plugins import load_plugins

    (folder / "plugin_that_works.py").write_text(GOOD)
    monkeypatch.delitem(sys.modules, "plugin_that_works", raising=False)
    try:
        assert load_plugins(["plugin_that_works"]) == ("mine",)
        assert site_of("mine").where == "mlp"
    finally:
        forget_site("mine")
        sys.modules.pop("plugin_that_works", None)


def test_the_example_names_its_plugin_which_registers_two_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    from megatronapp_common.job import load_job
    from megatronapp_common.job.arguments import megatron_arguments
    from megatronapp_trainer.hooks.sites import forget_site
    from megatronapp_trainer.scope.plugins import load_plugins

    root = pathlib.Path(__file__).parents[4]
    document = yaml.safe_load((root / "examples" / "scope-plugin-serve.yaml").read_text())
    arguments = megatron_arguments(load_job(document))
    (plugin,) = document["spec"]["scope"]["plugins"]
    assert arguments[arguments.index("--scope-plugins") + 1] == plugin
    (variable,) = document["spec"]["env"]
    monkeypatch.syspath_prepend(str(root / variable["value"]))
    try:
        assert load_plugins([plugin]) == ("input_norm", "activations")
    finally:
        forget_site("input_norm")
        forget_site("activations")
