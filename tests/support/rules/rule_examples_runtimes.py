"""Examples of the rules about MegaDPP, MegaFBD and checkpoints in memory, and about worlds with forward ranks."""

from typing import Any

from rule_example import Changes, bad, good, stays

_FBD = {"enabled": True}
_WHOLE: Changes = {"spec.nodes": 1, "spec.procPerNode": 8}
_BATCH = "spec.training.globalBatchSize"
_FREE: Changes = {"spec.nodes": None, "spec.procPerNode": None, _BATCH: None}

_IN_MEMORY: Changes = {
    "spec.checkpoint": {"save": "d", "memorySaveInterval": 5},
    "spec.runPolicy": {"restart": "InPlace"},
}


def forward(**fields: Any) -> Changes:
    """8 backward ranks on 2 workers and 8 forward ranks."""
    return {"spec.fbd": {"enabled": True, "forward": fields}}


def forward_on_cpu(**fields: Any) -> Changes:
    """8 backward ranks with GPUs, 8 forward ranks without, and what these need."""
    dropout: Changes = {"spec.model.attentionDropout": 0, "spec.model.hiddenDropout": 0}
    return forward(nodes=1) | dropout | {"spec.gpusPerNode": 4, "spec.fbd.ship": "full"} | fields


def fbd(**fields: Any) -> Changes:
    """8 ranks of each of 2 workers."""
    return {"spec.fbd": {"enabled": True, **fields}, "spec.procPerNode": 8}


def merged(**fields: Any) -> Changes:
    """2 replicas of tensor 2 x pipeline 2, and a forward rank for each tensor group."""
    return fbd(ignoreForwardTensorParallel=True) | {"spec.procPerNode": 6, "spec.model.attentionDropout": 0, **fields}


def dpp(**fields: Any) -> Changes:
    return {"spec.dpp": {"enabled": True, **fields}}


def both(**fields: Any) -> Changes:
    """2 replicas of 2 stages, and as many forward ranks, whose roles follow policies of MegaDPP."""
    return dpp(**fields) | fbd() | {"spec.parallelism.tensor": 1, "spec.procPerNode": 4}


_SLICED: Changes = {"spec.parallelism.sequenceParallel": True}
_RECOMPUTED: Changes = {"spec.training.recompute": {"granularity": "full", "method": "uniform", "numLayers": 1}}
_BLOCKS: Changes = {"spec.training.recompute": {"granularity": "full", "method": "block", "numLayers": 1}}
_THREE: Changes = {"spec.model.numLayers": 6}
_OF_DPP = {"schedule": "dfc", "placement": "loop", "memoryCap": 4, "chunks": 2, "transport": "native", "workload": 2}
_RUNTIMES = [
    *good("dpp-needs-pipeline", {"spec.dpp.enabled": True}),
    *bad(
        "dpp-needs-pipeline",
        "spec.dpp.enabled",
        ({"spec.dpp.enabled": True, "spec.parallelism.pipeline": 1}, "needs parallelism.pipeline above 1"),
    ),
    *good(
        "dpp-of-roles",
        both(),
        both(schedule="static"),
        both(schedule="dfc", placement="loop", chunks=2),
        dpp(memoryCap=4),
        fbd() | {"spec.parallelism.pipeline": 1},
    ),
    *bad(
        "dpp-of-roles",
        "spec.dpp.enabled",
        (dpp() | fbd(), "with fbd.enabled needs parallelism.tensor: 1"),
        (both(schedule="zero-bubble"), "or schedule zero-bubble"),
        (both(placement="vee", chunks=2), "placement vee"),
        (both(memoryCap=4), "no memoryCap"),
        (both(memoryCap="8Gi"), "no memoryCap"),
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
    *good(
        "vee-of-two-chunks",
        dpp(placement="vee", chunks=2),
        dpp(placement="vee", schedule="auto", memoryCap=4) | {"spec.parallelism.virtualPipeline": 2},
        dpp(placement="vee", schedule="zero-bubble", chunks=2),
        dpp(placement="loop", schedule="dfc", chunks=2),
    ),
    *bad(
        "vee-of-two-chunks",
        "spec.dpp.placement",
        (dpp(placement="vee"), "vee has two chunks on each rank"),
        (dpp(placement="vee", schedule="dfc", chunks=2), "and schedule auto or zero-bubble"),
    ),
    *good("zero-bubble-in-vee", dpp(placement="loop", schedule="zero-bubble"), dpp(placement="loop", chunks=2)),
    *bad(
        "zero-bubble-in-vee",
        "spec.dpp.placement",
        (dpp(placement="loop", schedule="zero-bubble", chunks=2), "loop has no order of zero-bubble with two chunks"),
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
                (dpp(placement="vee", chunks=2) | {f"spec.parallelism.{name}": 2}, "both ends of the model"),
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
    *good("merging-needs-fbd", merged()),
    *bad(
        "merging-needs-fbd",
        "spec.fbd.ignoreForwardTensorParallel",
        ({"spec.fbd.ignoreForwardTensorParallel": True}, "needs fbd.enabled: true"),
    ),
    *good("serving-needs-fbd", fbd(backwardPerForward=2) | {"spec.procPerNode": 6}, fbd(backwardPerForward=1)),
    *bad(
        "serving-needs-fbd",
        "spec.fbd.backwardPerForward",
        ({"spec.fbd.backwardPerForward": 2}, "needs fbd.enabled: true"),
    ),
    *good("ship-needs-fbd", fbd(ship="saved")),
    *bad("ship-needs-fbd", "spec.fbd.ship", ({"spec.fbd.ship": "full"}, "needs fbd.enabled: true")),
    *good(
        "fbd-without-gather", fbd() | {"spec.training.useDistributedOptimizer": True}, {"spec.fbd": {"enabled": False}}
    ),
    *bad(
        "fbd-without-gather",
        "spec.training.overlapParamGather",
        (
            fbd()
            | {
                "spec.training.useDistributedOptimizer": True,
                "spec.training.overlapGradReduce": True,
                "spec.training.overlapParamGather": True,
            },
            "cannot be combined with fbd.enabled yet; leave one of them out",
        ),
    ),
    *good(
        "merged-attention-dropout",
        merged(),
        fbd() | {"spec.model.attentionDropout": 0.1},
        merged() | {"spec.model.attentionDropout": None, "spec.args": ["--attention-dropout", "0"]},
    ),
    *bad(
        "merged-attention-dropout",
        "spec.model.attentionDropout",
        (merged() | {"spec.model.attentionDropout": 0.1}, "must be 0 with fbd.ignoreForwardTensorParallel"),
        (merged() | {"spec.model.attentionDropout": None}, "it is 0.1 by default"),
    ),
    *good(
        "merged-hidden-dropout",
        merged(),
        merged() | _RECOMPUTED,
        merged() | _SLICED,
        merged() | _RECOMPUTED | _SLICED | {"spec.fbd.ship": "saved"},
    ),
    *bad(
        "merged-hidden-dropout",
        "spec.model.hiddenDropout",
        (merged() | _SLICED | {"spec.fbd.ship": "full"}, "write hiddenDropout: 0, or ship: saved"),
        (merged() | _RECOMPUTED | _SLICED, "must be 0 with fbd.ignoreForwardTensorParallel, sequenceParallel and full"),
    ),
    *good("forward-needs-fbd", forward()),
    *bad("forward-needs-fbd", "spec.fbd.forward", ({"spec.fbd.forward": {"nodes": 2}}, "needs fbd.enabled: true")),
    *good(
        "forward-ranks-agree",
        forward(nodes=4),
        forward(procPerNode=1),
        forward(nodes=2, procPerNode=4),
        forward(gpusPerNode=4),
        {
            "spec.fbd": {
                "enabled": True,
                "ignoreForwardTensorParallel": True,
                "forward": {"nodes": 4, "procPerNode": 1},
            },
            "spec.model.attentionDropout": 0,
        },
        forward(nodes=1, procPerNode=4) | {"spec.fbd.backwardPerForward": 2},
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
        (forward(nodes=1, gpusPerNode=4), "8 ranks on a node of 4 GPUs; each rank needs its own GPU"),
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
    *good(
        "forward-on-cpu",
        forward_on_cpu(),
        forward_on_cpu(**{"spec.fbd.ship": None}) | _RECOMPUTED,
        forward_on_cpu() | _BLOCKS | {"spec.model.transformerImpl": "torch"},
        forward_on_cpu(**{"spec.fbd.ship": None, "spec.args": ["--recompute-method", "uniform"]}) | _BLOCKS,
        forward_on_cpu(**{"spec.fbd.ship": None, "spec.args": ["--fbd-ship=full"]}),
    ),
    *bad(
        "forward-on-cpu",
        "spec.fbd.forward.gpusPerNode",
        *(
            (forward_on_cpu(**change), "needs fbd.ship: full, model.attentionDropout: 0 and model.hiddenDropout: 0")
            for change in (
                {"spec.fbd.ship": None},
                {"spec.fbd.ship": None} | _BLOCKS,
                {"spec.fbd.ship": "auto"},
                {"spec.model.attentionDropout": None},
                {"spec.model.hiddenDropout": 0.1},
                {"spec.model.transformerImpl": "transformer_engine"},
            )
        ),
    ),
]
_WORLDS = [
    *good(
        "world-of-replicas",
        {"spec.fbd": _FBD},
        merged(),
        {"spec.fbd": _FBD, **_WHOLE},
        {"spec.fbd": _FBD | {"backwardPerForward": 2}, "spec.procPerNode": 6},
        forward(nodes=1) | {"spec.fbd.backwardPerForward": 2},
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
            merged() | {"spec.procPerNode": 4},
            "replicas of 6 ranks (tensor 2 x pipeline 2, and a forward rank for each tensor group)",
        ),
        (
            {"spec.fbd": _FBD | {"backwardPerForward": 2}, "spec.procPerNode": 8},
            "16 ranks (2 nodes x 8) cannot be divided into groups of 12 ranks (2 replicas of tensor 2 x pipeline 2, "
            "and their forward ranks); make nodes x procPerNode a multiple of 12",
        ),
        (
            forward(nodes=1) | {"spec.fbd.backwardPerForward": 2, "spec.procPerNode": 2},
            "4 ranks (2 nodes x 2) cannot be divided into groups of 8 ranks (2 replicas of tensor 2 x pipeline 2)",
        ),
    ),
    *good(
        "data-agrees",
        {"spec.fbd": _FBD, "spec.parallelism.data": 1},
        {"spec.fbd": _FBD | {"backwardPerForward": 2}, "spec.parallelism.data": 2, "spec.procPerNode": 6},
        {"spec.fbd": _FBD | {"backwardPerForward": 2}, "spec.parallelism.data": 4, "spec.procPerNode": None},
    ),
    *bad(
        "data-agrees",
        "spec.parallelism.data",
        ({"spec.fbd": _FBD, "spec.parallelism.data": 2}, "are 16 ranks, but 2 nodes x 4 are 8; write data: 1"),
        (
            {"spec.fbd": _FBD | {"backwardPerForward": 2}, "spec.parallelism.data": 4, "spec.procPerNode": 6},
            "4 replicas, in groups of 12 ranks (2 replicas of tensor 2 x pipeline 2, and their forward ranks) are 24 "
            "ranks, but 2 nodes x 6 are 12; write data: 2, or leave data out",
        ),
    ),
    *good(
        "forward-ranks-serve-one-kind", merged(), {"spec.fbd": _FBD | {"backwardPerForward": 2}, "spec.procPerNode": 6}
    ),
    *bad(
        "forward-ranks-serve-one-kind",
        "spec.fbd.backwardPerForward",
        (
            merged() | {"spec.fbd.backwardPerForward": 2},
            "and ignoreForwardTensorParallel exclude each other: a forward rank serves the ranks of a tensor group or",
        ),
    ),
    *good("data-of-forward-ranks", {"spec.fbd": _FBD | {"backwardPerForward": 3}, "spec.parallelism.data": 3, **_FREE}),
    *bad(
        "data-of-forward-ranks",
        "spec.parallelism.data",
        (
            {"spec.fbd": _FBD | {"backwardPerForward": 2}, "spec.parallelism.data": 3, **_FREE},
            "3 is not a multiple of fbd.backwardPerForward 2, the replicas that share forward ranks; write 4",
        ),
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
_MEMORY = [
    *good("memorySaveInterval-needs-save", _IN_MEMORY),
    *bad(
        "memorySaveInterval-needs-save",
        "spec.checkpoint.memorySaveInterval",
        (_IN_MEMORY | {"spec.checkpoint": {"memorySaveInterval": 5}}, "needs save: "),
    ),
    *good("memory-stays", _IN_MEMORY),
    *bad(
        "memory-stays",
        "spec.checkpoint.memorySaveInterval",
        (
            _IN_MEMORY | {"spec.runPolicy": {"restart": "Pods"}},
            "needs runPolicy.restart: InPlace, and so no scheduling.gang",
        ),
    ),
    *good("memory-without-fbd", _IN_MEMORY),
    *bad(
        "memory-without-fbd",
        "spec.checkpoint.memorySaveInterval",
        (_IN_MEMORY | {"spec.fbd": _FBD}, "leave it out, and write asyncSave: true and a short saveInterval"),
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
RUNTIME_EXAMPLES = (*_RUNTIMES, *_WORLDS, *_MEMORY, *_CHANGES)
