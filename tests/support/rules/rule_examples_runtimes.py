"""Examples of the rules about MegaDPP and MegaFBD, and of those about worlds with forward ranks."""

from typing import Any

from rule_example import Changes, bad, good, stays

_FBD = {"enabled": True}
_WHOLE: Changes = {"spec.nodes": 1, "spec.procPerNode": 8}
_BATCH = "spec.training.globalBatchSize"


def forward(**fields: Any) -> Changes:
    """8 backward ranks on 2 workers and 8 forward ranks."""
    return {"spec.fbd": {"enabled": True, "forward": fields}}


def dpp(**fields: Any) -> Changes:
    return {"spec.dpp": {"enabled": True, **fields}}


_THREE: Changes = {"spec.model.numLayers": 6}
_OF_DPP = {"schedule": "dfc", "memoryCap": 4, "chunks": 2, "transport": "native", "workload": 2}
_RUNTIMES = [
    *good("dpp-needs-pipeline", {"spec.dpp.enabled": True}),
    *bad(
        "dpp-needs-pipeline",
        "spec.dpp.enabled",
        ({"spec.dpp.enabled": True, "spec.parallelism.pipeline": 1}, "needs parallelism.pipeline above 1"),
    ),
    *good("dpp-or-fbd", {"spec.fbd.enabled": True, "spec.parallelism.pipeline": 1}),
    *bad(
        "dpp-or-fbd",
        "spec.fbd.enabled",
        ({"spec.dpp.enabled": True, "spec.fbd.enabled": True}, "dpp is enabled too, and each of them runs"),
    ),
    *(
        example
        for name, value in _OF_DPP.items()
        for example in (
            *good(f"{name}-needs-dpp", dpp(**{name: value}), dpp(memoryCap="8Gi")),
            *bad(f"{name}-needs-dpp", f"spec.dpp.{name}", ({f"spec.dpp.{name}": value}, "needs dpp.enabled: true")),
        )
    ),
    *good(
        "chunks-given-once",
        dpp(chunks=2),
        dpp(chunks=2) | {"spec.parallelism.virtualPipeline": 2},
        dpp() | {"spec.parallelism.virtualPipeline": 2},
    ),
    *bad(
        "chunks-given-once",
        "spec.dpp.chunks",
        (
            dpp(chunks=1) | {"spec.parallelism.virtualPipeline": 2},
            "1 differs from parallelism.virtualPipeline 2, and both are the model chunks of each rank; write one",
        ),
    ),
    *good("cap-of-free-order", dpp(memoryCap=3), dpp(memoryCap=3, schedule="bfc"), dpp(schedule="static")),
    *bad(
        "cap-of-free-order",
        "spec.dpp.memoryCap",
        (dpp(memoryCap=3, schedule="static"), "means nothing with schedule static or zero-bubble"),
        (dpp(memoryCap=3, schedule="zero-bubble"), "leave it out"),
    ),
    *good(
        "zero-bubble-of-two-chunks",
        dpp(schedule="zero-bubble", chunks=1),
        dpp(schedule="zero-bubble", chunks=2),
        dpp(schedule="dfc", chunks=4) | {"spec.model.numLayers": 8},
    ),
    *bad(
        "zero-bubble-of-two-chunks",
        "spec.dpp.schedule",
        (_THREE | dpp(schedule="zero-bubble", chunks=3), "zero-bubble has one chunk on each rank (ZB-H1) or two"),
        (_THREE | dpp(schedule="zero-bubble") | {"spec.parallelism.virtualPipeline": 3}, "or schedule: auto"),
    ),
    *(
        example
        for name in ("firstStageLayers", "lastStageLayers")
        for example in (
            *good(f"{name}-of-one-end", dpp(schedule="zero-bubble") | {f"spec.parallelism.{name}": 2}),
            *bad(
                f"{name}-of-one-end",
                f"spec.parallelism.{name}",
                (dpp(schedule="zero-bubble", chunks=2) | {f"spec.parallelism.{name}": 2}, "both ends of the model"),
            ),
        )
    ),
    *good("layers-of-stages", dpp(chunks=4) | {"spec.model.numLayers": 8}),
    *bad(
        "layers-of-stages",
        "spec.model.numLayers",
        (dpp(chunks=2) | {"spec.model.numLayers": 6}, "6 cannot be divided into 2 stages of 2 chunks; write 8"),
    ),
    *bad(
        "batch-of-interleaved-stages",
        _BATCH,
        (dpp(chunks=2) | {_BATCH: 6}, "6 gives 3 microbatches, and the interleaved schedule needs"),
    ),
    *good(
        "merging-needs-fbd",
        {"spec.fbd": {"enabled": True, "ignoreForwardTensorParallel": True}, "spec.procPerNode": 3},
    ),
    *bad(
        "merging-needs-fbd",
        "spec.fbd.ignoreForwardTensorParallel",
        ({"spec.fbd.ignoreForwardTensorParallel": True}, "needs fbd.enabled: true"),
    ),
    *good("forward-needs-fbd", forward()),
    *bad("forward-needs-fbd", "spec.fbd.forward", ({"spec.fbd.forward": {"nodes": 2}}, "needs fbd.enabled: true")),
    *good(
        "forward-ranks-agree",
        forward(nodes=4),
        forward(procPerNode=1),
        forward(nodes=2, procPerNode=4),
        forward(gpusPerNode=4),
        {"spec.fbd": {"enabled": True, "ignoreForwardTensorParallel": True, "forward": {"nodes": 4, "procPerNode": 1}}},
    ),
    *bad(
        "forward-ranks-agree",
        "spec.fbd.forward",
        (forward(nodes=3), "3 nodes x 2 are 6 ranks, but there are 8 forward ranks; make nodes x procPerNode equal"),
        (forward(procPerNode=3), "2 nodes x 3 are 6 ranks"),
        (forward(procPerNode=16), "1 nodes x 16 are 16 ranks"),
    ),
    *good("forward-ranks-of-a-node", {**forward(nodes=2), "spec.nodes": 32, _BATCH: None}),
    *bad(
        "forward-ranks-of-a-node",
        "spec.fbd.forward.nodes",
        (
            {**forward(), "spec.nodes": 32, _BATCH: None},
            "128 ranks on 1 nodes are 128 on each, at most 64 are possible; write nodes: 2 or more",
        ),
    ),
    *good("forward-ranks-of-gpus", forward(nodes=1, gpusPerNode=8)),
    *bad(
        "forward-ranks-of-gpus",
        "spec.fbd.forward.gpusPerNode",
        (forward(nodes=1, gpusPerNode=4), "8 ranks on a node of 4 GPUs; a rank needs a GPU of its own"),
        (forward(procPerNode=4, gpusPerNode=2), "4 ranks on a node of 2 GPUs"),
    ),
    *good("all-workers", {**forward(procPerNode=4), "spec.nodes": 2048, _BATCH: None}),
    *bad(
        "all-workers",
        "spec.fbd.forward.nodes",
        (
            {**forward(procPerNode=4), "spec.nodes": 2049, _BATCH: None},
            "2049 backward and 2049 forward workers are too many; at most 4096 are possible",
        ),
    ),
    *good("forward-gpus-named-once", forward(gpusPerNode=8, resources={"limits": {"nvidia.com/gpu": 8}})),
    *bad(
        "forward-gpus-named-once",
        "spec.fbd.forward.resources",
        (
            forward(gpusPerNode=8, resources={"limits": {"nvidia.com/gpu": 4}}),
            "names nvidia.com/gpu with another count than fbd.forward.gpusPerNode 8; leave it out",
        ),
    ),
]
_WORLDS = [
    *good(
        "world-of-replicas",
        {"spec.fbd": _FBD},
        {"spec.fbd": _FBD | {"ignoreForwardTensorParallel": True}, "spec.procPerNode": 6},
        {"spec.fbd": _FBD, **_WHOLE},
    ),
    *bad(
        "world-of-replicas",
        "spec.parallelism",
        (
            {"spec.fbd": _FBD, "spec.procPerNode": 6},
            "12 ranks (2 nodes x 6) cannot be divided into replicas of 8 ranks (tensor 2 x pipeline 2, forward and "
            "backward); make nodes x procPerNode a multiple of 8",
        ),
        (
            {"spec.fbd": _FBD | {"ignoreForwardTensorParallel": True}},
            "replicas of 6 ranks (tensor 2 x pipeline 2, and a forward rank for each tensor group)",
        ),
    ),
    *good("data-agrees", {"spec.fbd": _FBD, "spec.parallelism.data": 1}),
    *bad(
        "data-agrees",
        "spec.parallelism.data",
        ({"spec.fbd": _FBD, "spec.parallelism.data": 2}, "are 16 ranks, but 2 nodes x 4 are 8; write data: 1"),
    ),
    *good("batch-of-replicas", {"spec.fbd": _FBD, _BATCH: 7}),
    *good(
        "fault-within-ranks",
        {**forward(nodes=2), "spec.faults": [{"rank": 15, "kind": "host", "factor": 2, "fromStep": 1, "steps": 1}]},
    ),
    *bad(
        "fault-within-ranks",
        "spec.faults",
        (
            {
                **forward(nodes=2),
                "spec.faults": [{"rank": 16, "kind": "host", "factor": 2, "fromStep": 1, "steps": 1}],
            },
            "rank 16 is outside of this job's 16 ranks; write 0 to 15",
        ),
    ),
]
_CHANGES = stays(
    "chunks-stay",
    "spec.dpp.chunks",
    good=[
        (dpp() | {"spec.suspend": True}, dpp(chunks=2)),
        (dpp(chunks=2), dpp(chunks=2, schedule="dfc", memoryCap=4)),
    ],
    bad=[(dpp(chunks=2), dpp(), "was 2 and is now omitted; it may change only while the job is suspended")],
)
RUNTIME_EXAMPLES = (*_RUNTIMES, *_WORLDS, *_CHANGES)
