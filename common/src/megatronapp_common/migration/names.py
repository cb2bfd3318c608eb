"""Flags, variables, files, fields and controls that the pages of MegatronApp name, and their replacements."""

from typing import Final

_LAUNCHER = "the launcher sets it; leave it out"
SAME = "the same"

FLAGS: Final[dict[str, str]] = {
    "--trace": f"{SAME}; in a manifest spec.trace.enabled",
    "--trace-dir": f"{SAME}: a file of each rank with the steps in windows, none without the flag; in a manifest "
    "spec.trace.directory. Every step of a traced job is in its hub, too: megatronapp trace export JOB -o FILE",
    "--trace-interval": f"{SAME}; in a manifest spec.trace.interval. Phases are recorded in every step",
    "--continuous-trace-iterations": f"{SAME}; in a manifest spec.trace.continuousIterations",
    "--trace-granularity": f"{SAME}: base (tensor-parallel collectives) or full (layers, too); in a manifest "
    "spec.trace.granularity. Of a job that runs: megatronapp trace window JOB --steps N",
    "--transformer-impl": f"{SAME}: torch (ours), local or transformer_engine",
    "--tranformer-impl": "a misprint of --transformer-impl",
    "--use-dpp": f"{SAME}; in a manifest spec.dpp.enabled",
    "--workload": "here the threads of a rank that copy its messages (1 to 64, in a manifest spec.dpp.workload), there "
    "the number of elements for each thread; leave it out",
    "--node-ips": f"{SAME}, checked against the rank table; leave it out: the launcher finds the addresses",
    "--num-gpus": f"{SAME}, checked: ranks of a node; in a manifest spec.procPerNode and spec.gpusPerNode",
    "--multi-node": f"{SAME}, checked: the ranks are on several nodes; in a manifest spec.nodes",
    "--forward-backward-disaggregating": f"{SAME}: half of the ranks run forward, half as many replicas train; in a "
    "manifest spec.fbd.enabled, which adds forward ranks to parallelism.data replicas",
    "--ignore-forward-tensor-parallel": f"{SAME}, with --attention-dropout 0; in a manifest "
    "spec.fbd.ignoreForwardTensorParallel",
    "--training-ws-port": f"{SAME}: the training starts paused and is controlled from its page (megatronapp ui "
    "JOB), at the address of the hub instead of this port; in a manifest spec.scope.training.startPaused",
    "--enable-ws-server": "megatronapp serve always serves the pages, and accepts the flag",
    "--tensor-model-parallel-size": f"{SAME}; in a manifest spec.parallelism.tensor",
    "--sequence-parallel": f"{SAME}; in a manifest spec.parallelism.sequenceParallel",
    "--pipeline-model-parallel-size": f"{SAME}; in a manifest spec.parallelism.pipeline",
    "--num-layers-per-virtual-pipeline-stage": f"{SAME}; in a manifest spec.parallelism.virtualPipeline (chunks)",
    "--pipeline-model-parallel-layout": "is not supported; give --decoder-first-pipeline-num-layers, "
    "--decoder-last-pipeline-num-layers, or --account-for-embedding-in-pipeline-split, "
    "--account-for-loss-in-pipeline-split",
    "--data-parallel-random-init": "leave it out: all replicas begin with the same weights, as with it there; the rest "
    "of its meaning, other dropout masks on each replica, is not supported",
    "--overlap-grad-reduce": f"{SAME}; in a manifest spec.training.overlapGradReduce",
    "--use-distributed-optimizer": f"{SAME}; in a manifest spec.training.useDistributedOptimizer",
    "--recompute-activations": SAME,
    "--recompute-granularity": f"{SAME}; in a manifest spec.training.recompute.granularity",
    "--recompute-method": f"{SAME}; in a manifest spec.training.recompute.method",
    "--recompute-modules": f"{SAME} for core_attn, mlp (with --disable-bias-linear), moe and shared_experts; in a "
    "manifest spec.args",
    "--recompute-num-layers": f"{SAME}; in a manifest spec.training.recompute.numLayers",
    "--use-flash-attn": f"{SAME}; the fastest attention that the device has is taken in any case",
    "--num-experts": f"{SAME}, as the other flags of experts (docs/moe.md); in a manifest spec.args",
    "--expert-model-parallel-size": f"{SAME}; in a manifest spec.parallelism.expert",
    "--context-parallel-size": f"{SAME}; in a manifest spec.parallelism.context",
    "--cp-comm-type": f"{SAME} for p2p and a2a; in a manifest spec.args",
    "--fp8-format": f"{SAME} for e4m3, with --bf16; write it for hybrid, too. Gradients of weights are computed in "
    "bf16 (docs/training.md); in a manifest spec.args",
    "--fp8-recipe": "the only recipe is rowwise, which Megatron-LM does not have; leave it out",
    "--fp16": f"{SAME}; in a manifest spec.training.precision: fp16; megatronapp serve has --precision fp16",
    "--loss-scale": f"{SAME}; in a manifest spec.args",
    "--tokenizer-type": f"{SAME} for GPT2BPETokenizer and HuggingFaceTokenizer, whose files say it: --vocab-file with "
    "--merge-file, or --tokenizer-file; for BERT BertWordPieceLowerCase or BertWordPieceCase, with --vocab-file",
    "--tokenizer-model": f"{SAME} as --tokenizer-file: a tokenizer.json, or its folder",
    "--vocab-file": f"{SAME}; in a manifest spec.data.vocabFile",
    "--merge-file": f"{SAME}; in a manifest spec.data.mergeFile",
    "--split": f"{SAME}; in a manifest spec.data.split",
    "--data-path": f"{SAME}; in a manifest spec.data.path",
    "--save": f"{SAME}; in a manifest spec.checkpoint.save",
    "--load": f"{SAME}, but a run whose --save holds checkpoints continues from these, and says so; in a manifest "
    "spec.checkpoint.load",
    "--enable-experimental": "nothing here is switched on by it; leave it out",
}

VARIABLES: Final[dict[str, str]] = {
    "MASTER_ADDR": _LAUNCHER,
    "MASTER_PORT": _LAUNCHER,
    "WORLD_SIZE": _LAUNCHER,
    "NODE_RANK": _LAUNCHER,
    "RANK": _LAUNCHER,
    "NODE_IPS": _LAUNCHER,
    "MEGATRON_NODE_IPS": _LAUNCHER,
    "NNODES": "spec.nodes",
    "NPROC_PER_NODE": "spec.procPerNode",
    "GPUS_PER_NODE": "spec.gpusPerNode",
    "TP": "spec.parallelism.tensor, or --tensor-model-parallel-size",
    "PP": "spec.parallelism.pipeline, or --pipeline-model-parallel-size",
    "tensor_parallel": "spec.parallelism.tensor",
    "pipeline_parallel": "spec.parallelism.pipeline",
    "model_chunks": "spec.parallelism.virtualPipeline",
    "virtual_stage_layer": "follows from spec.parallelism.virtualPipeline; or --num-layers-per-virtual-pipeline-stage",
    "TRACE_FLAGS": "spec.trace.enabled; the scripts never read it",
    "NCCL_DEBUG": f"{SAME}, in spec.env",
    "CUDA_DEVICE_MAX_CONNECTIONS": f"{SAME}, in spec.env; where it is not given 1, with MegaDPP or MegaFBD "
    "and without tensor parallelism 8, and on forward ranks",
}

FILES: Final[dict[str, str]] = {
    "benchmark-data-{}-pipeline-{}-tensor-{}.json": "written with --trace-dir; read by megatronapp aggregate, trace "
    "import and scan analyze",
    "trace_output": f"{SAME}, with --trace-dir trace_output",
    "benchmark/": "the hub's folder of the job; megatronapp trace export JOB -o FILE",
    "abnormal.txt": "megatronapp scan analyze and, while a job runs, megatronapp describe JOB name slow ranks, links "
    "and hosts with their cause",
    "latest_checkpointed_iteration.txt": "written, in spec.checkpoint.save, but the newest whole folder is resumed; to "
    "go back, move later ones to another folder",
    "iter_0000020": "the same name; of Megatron-LM's own, megatronapp checkpoint convert --load-dir DIR --save-dir NEW",
    "mp_rank_00_000/model_optim_rng.pt": "megatronapp checkpoint convert --load-dir DIR --save-dir NEW",
    "gpt_text_document.bin": f"{SAME}, by megatronapp data prepare",
    "dataset.json": "read as it is: one JSON object a line",
    "Dockerfile": "images/trainer/Dockerfile and its neighbours; make images builds them",
    "requirements.txt": "pyproject.toml and constraints.txt; make setup",
}

FIELDS: Final[dict[str, str]] = {
    "ContainerImage": "spec.image",
    "GPU": "spec.gpusPerNode",
    "CPU": "spec.resources",
    "memory": "spec.resources",
    "NVMEStorage": "spec.checkpoint.volume, spec.data.volume, or spec.podTemplate",
    "UseShm": "/dev/shm is always there",
    "ShmSize": "spec.shm.sizeLimit",
    "UseIB": "spec.network.rdma",
}
"""Fields of the pod profile."""

CONTROLS: Final[dict[str, str]] = {
    "prompts": "on the page of a served model, side by side",
    "number of tokens": "there",
    "QKV": "there",
    "attention": "there, by layer and head",
    "MLP1": "there",
    "MLP2": "there",
    "output probabilities": "there",
    "PCA": "there, with the choice of a layer",
    "pixels": "there",
    "filter expression": "there (docs/expressions.md)",
    "weight perturbation": "kind: storage of a recipe (docs/perturbation.md): drawn once for the named parameters; in "
    "a training by megatronapp training JOB perturb FILE, for one step or with --target master for good",
    "calculation perturbation": "kind: calculation of a recipe, with site: mlp2 for the place of the old pages",
    "system perturbation": "kind: system of a recipe: constant for each layer",
    "noise1": "action.type: gaussian of a recipe: x + N(0, coefficient^2)",
    "noise2": "action.type: uniform of a recipe: x * U(1 - coefficient, 1 + coefficient)",
    "coefficient": "action.coefficient of a recipe",
    "training mode": "on the page of a job with spec.scope.training: control bar, layers over steps, probe texts "
    "(docs/steering-training.md, docs/watching-training.md)",
    "mode switch": "spec.mode of a job",
    "generate": "the form Generate of the page, or POST /api/v1/scope/runs of the hub (docs/scope-protocol.md)",
    "run_training_step": "megatronapp training JOB step N, or Step on the page of the job (docs/steering-training.md)",
    "visualization_flags": "capture of a run (docs/scope-protocol.md, section 3); in a training "
    "spec.scope.training.captureEvery, which captures all sites",
    "disturbance_configs": "perturbation of a run, or megatronapp training JOB perturb FILE: a recipe "
    "(docs/perturbation.md)",
    "compressor_config": "pixels and expression of the capture of a run (docs/expressions.md)",
}

NAMES: Final = {**FLAGS, **VARIABLES, **FILES, **FIELDS, **CONTROLS}
