"""Every rule accepts and refuses what its examples say, alone; no rule ever fails to say yes or no."""

import collections
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest_workers import examples
from rule_examples import ADMISSION_EXAMPLES, EXAMPLES, Changes, Example, changed, manifest, old_manifest

from megatronapp_common.errors import JobError
from megatronapp_common.job import Spec, check_update, derive_world, judge, load_job
from megatronapp_common.job.admission import ADMISSION_RULES
from megatronapp_common.job.crd import compact, custom_resource_definition
from megatronapp_common.job.rules import CHANGE_RULES, NAME_RULES, SPEC_RULES, Rule
from megatronapp_common.job.rules.runtimes import FORWARD_RULES
from megatronapp_common.job.rules.world import WORLD_RULES

RULES = (*NAME_RULES, *SPEC_RULES, *CHANGE_RULES, *ADMISSION_RULES)
ALL_EXAMPLES = (*EXAMPLES, *ADMISSION_EXAMPLES)
OF_SPECS = [example for example in ALL_EXAMPLES if example.old is None]
OF_CHANGES = [example for example in EXAMPLES if example.old is not None]


def named(examples: list[Example]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "example", [pytest.param(e, id=f"{e.rule_id}-{'good' if e.good else 'bad'}") for e in examples]
    )


def test_ids_are_unique() -> None:
    assert not [name for name, count in collections.Counter(rule.id for rule in RULES).items() if count > 1]


def test_every_rule_has_a_good_and_a_bad_example() -> None:
    ids = {rule.id for rule in RULES}
    assert {example.rule_id for example in ALL_EXAMPLES if example.good} == ids
    assert {example.rule_id for example in ALL_EXAMPLES if not example.good} == ids


@named(OF_SPECS)
def test_a_spec_is_refused_by_its_rule_alone(example: Example) -> None:
    if example.good:
        load_job(manifest(example))
        return
    with pytest.raises(JobError) as refused:
        load_job(manifest(example))
    assert len(refused.value.problems) == 1, refused.value
    place, message = refused.value.problems[0].split(": ", 1)
    assert place == example.field
    assert example.message in message


@named(OF_CHANGES)
def test_a_change_is_refused_by_its_rule_alone(example: Example) -> None:
    before = old_manifest(example)
    assert before is not None
    found = check_update(load_job(before).spec, load_job(manifest(example)).spec)
    if example.good:
        assert found == []
        return
    assert len(found) == 1, found
    assert found[0].startswith(f"{example.field}: ")
    assert example.message in found[0]


def test_examples_of_a_rule_break_that_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its rule a bad example is accepted: it is this rule that refuses it, and no other of the same field."""
    for example in OF_SPECS:
        if example.good or example.rule_id in {rule.id for rule in NAME_RULES}:
            continue
        for name, rules in (("SPEC_RULES", SPEC_RULES), ("ADMISSION_RULES", ADMISSION_RULES)):
            monkeypatch.setattr(judge, name, [rule for rule in rules if rule.id != example.rule_id])
        load_job(manifest(example))


def test_a_claim_that_no_profile_has_is_missed_once_the_profile_is_merged() -> None:
    spec = {"gpusPerNode": 4, "gpuResourceName": "resource.k8s.io/claims", "profile": "small"}
    document = changed({f"spec.{name}": value for name, value in spec.items()})
    load_job(document)
    with pytest.raises(JobError, match="podTemplate claims nothing for the trainer"):
        load_job(document, merged=True)


@pytest.mark.parametrize("value", [2**63, -(10**30), 10**400, 1e300, None, [], {"a": [None]}])
def test_any_content_of_a_pod_template_is_judged(value: Any) -> None:
    load_job(changed({"spec.podTemplate.spec": {"unknown": value}, "spec.affinity": {"unknown": value}}))


def spec_with(changes: Changes) -> Spec:
    """BASE with changes that the types accept."""
    return Spec.model_validate_json(json.dumps(changed(changes)["spec"]))


sizes = st.integers(1, 8) | st.sampled_from([64, 4096, 262_144, 2_147_483_647])
SIZES: dict[str, Any] = {
    "mode": st.sampled_from(["train", "serve"]),
    "nodes": st.none() | sizes.map(lambda size: min(size, 4096)),
    "procPerNode": st.none() | sizes.map(lambda size: min(size, 64)),
    "gpusPerNode": st.integers(0, 64),
    "parallelism": st.fixed_dictionaries(
        {},
        optional={
            "tensor": sizes.map(lambda size: min(size, 262_144)),
            "pipeline": sizes.map(lambda size: min(size, 262_144)),
            "context": sizes.map(lambda size: min(size, 262_144)),
            "expert": sizes.map(lambda size: min(size, 262_144)),
            "virtualPipeline": sizes,
            "data": sizes,
            "sequenceParallel": st.booleans(),
        },
    ),
    "dpp": st.fixed_dictionaries(
        {"enabled": st.booleans()},
        optional={
            "chunks": sizes,
            "schedule": st.sampled_from(["auto", "static", "zero-bubble"]),
            "placement": st.sampled_from(["loop", "vee"]),
            "memoryCap": sizes,
        },
    ),
    "fbd": st.fixed_dictionaries(
        {"enabled": st.booleans()},
        optional={
            "ignoreForwardTensorParallel": st.booleans(),
            "backwardPerForward": st.integers(1, 4) | st.just(64),
            "ship": st.sampled_from(["saved", "full"]),
            "forward": st.fixed_dictionaries(
                {"gpusPerNode": st.integers(0, 64)},
                optional={
                    "nodes": sizes.map(lambda size: min(size, 4096)),
                    "procPerNode": sizes.map(lambda size: min(size, 64)),
                },
            ),
        },
    ),
    "model.numLayers": sizes,
    "model.hiddenSize": sizes,
    "model.numAttentionHeads": sizes,
    "model.numQueryGroups": st.none() | sizes,
    "training.microBatchSize": sizes,
    "training.globalBatchSize": st.none() | sizes,
    "training.rampupBatchSize": st.none() | st.lists(sizes, min_size=3, max_size=3),
    "training.minLr": st.none() | st.floats(0, 1e308),
    "data.path": st.lists(st.sampled_from(["a", "1", ".5", "1.", "é"]), max_size=5),
    "faults": st.lists(
        st.fixed_dictionaries(
            {
                "rank": sizes,
                "kind": st.sampled_from(["link", "host"]),
                "factor": st.just(2),
                "fromStep": sizes,
                "steps": sizes,
            },
            optional={"peer": sizes},
        ),
        max_size=2,
    ),
}


@settings(max_examples=examples(200), deadline=None)
@given(changes=st.fixed_dictionaries({}, optional=SIZES))
def test_whatever_the_types_accept_is_judged_and_has_a_world_if_accepted(changes: dict[str, Any]) -> None:
    spec = spec_with({f"spec.{path}": value for path, value in changes.items()})
    if not judge.find_problems(spec.to_dict()):
        world = derive_world(spec)
        assert world.world_size == sum(world.proc_per_node)


@settings(max_examples=examples(200), deadline=None)
@given(
    nodes=SIZES["nodes"],
    ranks=SIZES["procPerNode"],
    gpus=SIZES["gpusPerNode"],
    layout=SIZES["parallelism"],
    fbd=st.just({}) | SIZES["fbd"],
)
def test_the_rules_of_the_world_and_its_arithmetic_agree(
    *, nodes: int | None, ranks: int | None, gpus: int, layout: dict[str, int], fbd: dict[str, Any]
) -> None:
    spec = spec_with(
        {
            "spec.nodes": nodes,
            "spec.procPerNode": ranks,
            "spec.gpusPerNode": gpus,
            "spec.parallelism": layout,
            "spec.fbd": fbd,
        }
    )
    refused = bool(judge.evaluate_rules((*WORLD_RULES, *FORWARD_RULES), {"self": spec.to_dict()}))
    try:
        derive_world(spec.model_copy(update={"parallelism": spec.parallelism.model_copy(update={"expert": 1})}))
        accepted = True
    except JobError:
        accepted = False
    assert accepted != refused


@settings(max_examples=examples(100), deadline=None)
@given(before=st.fixed_dictionaries({}, optional=SIZES), after=st.fixed_dictionaries({}, optional=SIZES))
def test_any_change_is_judged(before: dict[str, Any], after: dict[str, Any]) -> None:
    old = spec_with({f"spec.{path}": value for path, value in before.items()})
    new = spec_with({f"spec.{path}": value for path, value in after.items()})
    assert check_update(old, old) == []
    if old.parallelism != new.parallelism:
        assert any(line.startswith("spec.parallelism: ") for line in check_update(old, new))
        assert not any(
            line.startswith("spec.parallelism: ")
            for line in check_update(old.model_copy(update={"suspend": True}), new)
        )


def test_the_crd_holds_every_rule_once() -> None:
    schema = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    in_crd = [*schema["x-kubernetes-validations"], *schema["properties"]["spec"]["x-kubernetes-validations"]]
    lenient = [rule for rule in (*NAME_RULES, *SPEC_RULES) if not rule.in_schema]
    for entry, rule in zip(in_crd, lenient, strict=False):
        assert (
            entry["rule"].count(f"({compact(rule.rule)})") == 1
            and "oldSelf" in entry["rule"]
            and entry["optionalOldSelf"]
        )
    for entry, rule in zip(in_crd[len(lenient) :], CHANGE_RULES, strict=True):
        assert entry["rule"].count(compact(rule.rule)) == 1 and "optionalOldSelf" not in entry
    assert all(entry["message"] and "\n" not in entry["message"] for entry in in_crd)
    assert schema["properties"]["spec"]["properties"]["env"]["x-kubernetes-list-map-keys"] == ["name"]


PLAIN = (
    "![true,false].all(k,[?k?optional.of(self):oldSelf].all(self,",
    "[?true?optional.of(oldSelf):optional.none()].all(oldSelf,[?true?optional.of(self):optional.none()].all(self,",
)
"""How a rule begins that reads `self` and `oldSelf` as plain data."""


def test_rules_read_the_spec_as_plain_data_and_its_profile_last(spec_schema: dict[str, Any]) -> None:
    """A field of an object with a schema costs the API server twenty times as much, at every write of a status, too."""
    rules = spec_schema["x-kubernetes-validations"]
    with_schema = [rule["fieldPath"] for rule in rules if not rule["rule"].startswith(PLAIN)]
    assert with_schema == [".data.path", ".runPolicy.rules"], "one too expensive to be judged twice, one reads `in`"
    of_profiles = [rule["rule"] for rule in rules if "self.profile" in rule["rule"]]
    assert len(of_profiles) == len([rule for rule in SPEC_RULES if not rule.in_schema])
    assert all(rule.endswith("||has(self.profile)") for rule in of_profiles)


TOKENS = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\w+|[^\w\s]""")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_compact_text_has_the_same_tokens_and_fewer_spaces(rule: Rule) -> None:
    for text in (rule.rule, rule.message_expression):
        assert "//" not in "".join(token for token in TOKENS.findall(text) if token[0] not in "'\"")
        assert TOKENS.findall(compact(text)) == TOKENS.findall(text)
        assert compact(compact(text)) == compact(text)


def test_compact_text_keeps_literals_and_spaces_between_identifiers() -> None:
    text = "word in [ 'a  b', 'it\\'s  1' ]  ||  x == \"two  spaces\" ? 'a, b' : c"
    assert compact(text) == "word in['a  b','it\\'s  1']||x==\"two  spaces\"?'a, b':c"


@pytest.fixture(scope="module")
def spec_schema() -> dict[str, Any]:
    version = custom_resource_definition()["spec"]["versions"][0]
    found: dict[str, Any] = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return found


@pytest.mark.parametrize("rule", SPEC_RULES, ids=lambda rule: rule.id)
def test_every_list_and_text_that_a_rule_reads_has_a_limit(rule: Rule, spec_schema: dict[str, Any]) -> None:
    for path in judge.fields_mentioned(rule):
        node = spec_schema
        for name in path:
            if "properties" not in node:
                break
            node = node["properties"][name]
        for inner in (node, node.get("items", {}), *node.get("items", {}).get("properties", {}).values()):
            if inner.get("type") == "array":
                assert "maxItems" in inner, path
            if inner.get("type") == "object" and "additionalProperties" in inner:
                assert "maxProperties" in inner, path
            if inner.get("type") == "string":
                assert "maxLength" in inner or "enum" in inner, path
