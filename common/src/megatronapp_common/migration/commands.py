"""The commands and scripts that the pages of MegatronApp print, and the commands that replace them.

In a replacement `{args}` is the original arguments, `{train}` those of them that the trainer takes, `{launch}` the
options of torchrun, `{1=WORD}` their first argument, or WORD without one, and `{--flag=WORD}` the value of an option.
"""

import dataclasses
from typing import Final


@dataclasses.dataclass(frozen=True, slots=True)
class LegacyCommand:
    """A command of MegatronApp and its replacement."""

    printed: str
    """Spelling on a page; several spellings, one a line, have the same meaning."""
    pattern: str
    """Regular expression for the program's name without its folder, or for the first arguments of a command."""
    here: tuple[str, ...]
    """Commands to run instead; empty where none is needed or available."""
    why: str
    later: str | None = None
    """Part that is not available yet."""


_MANIFEST = "examples/gpt-tiny-cpu.yaml"
_RUN = (f"megatronapp run {_MANIFEST} --follow",)
_APPLY = (f"kubectl apply -f {_MANIFEST}",)
_ONE_JOB = (
    "one manifest describes model, layout and nodes; copy the example and change its fields, or add flags to spec.args"
)
_ALL_NODES = (
    "one manifest starts every node; addresses, ranks and their order are found, nothing is edited with sed; "
    "examples/train-cluster.yaml asks for GPUs, shared memory and RDMA; MegaDPP between nodes with GPUs sends over UCX "
    "(its messages were tried on GPUs, no training)"
)
_BERT_MANIFEST = "examples/bert-cpu.yaml"
_T5 = "T5"
_DPP = (
    f"{_ONE_JOB}; --use-dpp is spec.dpp.enabled, --workload spec.dpp.workload, the number of chunks spec.dpp.chunks; "
    "docs/megadpp.md has the schedules"
)
_FBD = (
    f"{_ONE_JOB}; --forward-backward-disaggregating is spec.fbd.enabled, --ignore-forward-tensor-parallel "
    "spec.fbd.ignoreForwardTensorParallel, forward ranks on other nodes spec.fbd.forward; there is no coordinator to "
    "start; docs/megafbd.md has modes and limits"
)
_NO_BUILD = (
    "the transport of MegaDPP is part of the native extension, and built with it; between nodes it loads UCX, for RDMA "
    "that of MEGATRONAPP_UCX_LIBRARY (not tried)"
)
_IMAGES = "images of trainer, analyzer and operator, with all that they need; no shell and no SSH in a pod"
_INSPECT = "the page of a job is served while it runs, and opens with an address that is valid once"

COMMANDS: Final = (
    LegacyCommand(
        "docker run --runtime --nvidia --gpus all -it --rm -v /path/to/megatron:/workspace/megatron "
        "nvcr.io/nvidia/pytorch:25.04-py3\nbash prerequisite.sh",
        r"docker run|prerequisite\.sh",
        ("make images",),
        _IMAGES,
    ),
    LegacyCommand(
        "pip install -r requirements.txt\npip install -r requirements/requirements.txt",
        r"pip3? install -r",
        ("make setup",),
        "exact versions with their hashes are in the repository; the images hold the same",
    ),
    LegacyCommand(
        "pip install -e .\npython setup.py install\ncd megatron/shm_tensor_new_rdma && pip install -e .\n"
        "cd megatron/shm_tensor_new_rdma_pre_alloc && pip install -e .\n"
        "cd megatron/shm_tensor_new_rdma_multithread && pip install -e .",
        r"pip3? install -e|setup\.py",
        ("make setup",),
        _NO_BUILD,
    ),
    LegacyCommand(
        "python ../tools/preprocess_data.py --input dataset.json --output-prefix bert --vocab-file vocab.txt "
        "--tokenizer-type BertWordPieceLowerCase --split-sentences --workers $(nproc)",
        r"preprocess_data\.py .*(BertWordPiece|--split-sentences).*",
        ("megatronapp data prepare {args}",),
        "the same files, in one run; sentences are split without a download; the options are understood",
    ),
    LegacyCommand(
        "python ../tools/preprocess_data.py --input gpt/dataset.json --output-prefix gpt --vocab-file gpt/vocab.json "
        '--tokenizer-type GPT2BPETokenizer --merge-file gpt/merges.txt --append-eod --workers "$(nproc)"',
        r"preprocess_data(\.py)?",
        ("megatronapp data prepare {args}",),
        "the same files; the options are understood",
    ),
    LegacyCommand(
        "bash test_scripts/process_dataset_gpt.sh",
        r"process_dataset_gpt\.sh",
        (
            "megatronapp data prepare --input gpt/dataset.json --output gpt --vocab-file gpt/vocab.json "
            "--merge-file gpt/merges.txt --append-eod",
        ),
        "the same files",
    ),
    LegacyCommand(
        "torchrun --nproc_per_node 4 pretrain_gpt.py --num-layers 2 --hidden-size 64 "
        "--num-attention-heads 4 --seq-length 64 "
        "--micro-batch-size 1 --lr 1e-3 --train-iters 10 --mock-data --vocab-size 512",
        r"pretrain_gpt\.py",
        ("torchrun {launch} -m megatronapp_trainer.pretrain {train}",),
        "the same flags; for tracing, restarts and pages use a manifest: megatronapp run FILE",
    ),
    LegacyCommand(
        "torchrun --nproc_per_node 4 pretrain_bert.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
        "--seq-length 64 --micro-batch-size 1 --lr 1e-4 --train-iters 10 --data-path bert_text_sentence "
        "--vocab-file vocab.txt --tokenizer-type BertWordPieceLowerCase",
        r"pretrain_bert\.py .+",
        ("torchrun {launch} -m megatronapp_trainer.pretrain --model-type bert {train}",),
        "the same flags, with --tokenizer-type; for tracing, restarts and pages use a manifest: megatronapp run FILE",
    ),
    LegacyCommand(
        "python pretrain_bert.py\nbash pretrain_bert_distributed.sh\nbash pretrain_bert_distributed_with_mp.sh\n"
        "bash examples/bert/train_bert_340m_distributed.sh\nbash run_single_bert.sh\nbash run_master_bert.sh\n"
        "bash run_worker_bert.sh",
        r"pretrain_bert.*|train_bert.*\.sh|run_(single|master|worker)_bert\.sh",
        (f"megatronapp run {_BERT_MANIFEST} --follow",),
        f"{_ONE_JOB}; docs/bert.md has the data",
    ),
    LegacyCommand(
        "python pretrain_t5.py\nbash pretrain_t5_distributed_with_mp.sh\nbash examples/t5/train_t5_220m_distributed.sh",
        r"pretrain_t5.*|train_t5.*\.sh",
        (),
        "GPT and BERT are trained now",
        _T5,
    ),
    LegacyCommand(
        "bash run_single.sh\nbash run_single_gpt.sh\nbash scripts/run_single_gpt.sh\n"
        "bash test_scripts/test_train_gpt_single_dpp.sh\nbash run_single_with_profiling.sh",
        r"run_single(_gpt)?\.sh|test_train_gpt_single_dpp\.sh|run_single_with_profiling\.sh",
        ("megatronapp run examples/dpp.yaml --follow",),
        _DPP,
    ),
    LegacyCommand(
        "bash run_master.sh\nbash run_worker.sh\nbash run_master_gpt.sh\nbash run_worker_gpt.sh\n"
        "bash examples/gpt3/train_gpt3_175b_distributed_master.sh",
        r"run_(master|worker)(_gpt)?\.sh|train_gpt3_175b_distributed_(master|worker)\.sh",
        _APPLY,
        _ALL_NODES,
    ),
    LegacyCommand(
        "bash pretrain_gpt_distributed.sh\nbash pretrain_gpt_distributed_with_mp.sh\n"
        "bash examples/gpt3/train_gpt3_175b_distributed.sh\nbash examples/gpt3/train_gpt3_345m_distributed.sh\n"
        "bash test_scripts/test_train_gpt_single_trace.sh\nbash test_scripts/train_gpt_single_trace.sh\n"
        "bash scripts/DockerUsage_MegaScan.sh\nbash docker/DockerUsage_MegaScan.sh\n"
        "bash examples/mymodel/train_mymodel.sh",
        r"pretrain_gpt.*_distributed.*\.sh|train_gpt3.*\.sh|(test_)?train_gpt_single_trace\.sh|DockerUsage_MegaScan\.sh"
        r"|train_\w+\.sh",
        _RUN,
        f"{_ONE_JOB}; spans are recorded and slow ranks named while it runs",
    ),
    LegacyCommand(
        "TP=1 PP=2 NNODES=1 NCCL_DEBUG=INFO MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 bash "
        "scripts/DockerUsage_MegaScope.sh",
        r"DockerUsage_MegaScope\.sh",
        ("megatronapp run examples/steered-cpu.yaml", "megatronapp ui steered-cpu"),
        f"{_ONE_JOB}; this training waits before its first step for orders from its page: steps, pauses, captures of "
        "layers, perturbations (docs/steering-training.md)",
    ),
    LegacyCommand(
        "bash pretrain_gpt.sh 0",
        r"pretrain_gpt\.sh",
        _RUN,
        f"{_ONE_JOB}; checkpoints lie in the same folders (iter_0000020, latest_checkpointed_iteration.txt)",
    ),
    LegacyCommand(
        "bash scripts/DockerUsage_MegaFBD.sh $RANK\nbash docker/DockerUsage_MegaFBD.sh 0\n"
        "bash test_scripts/test_train_gpt_distributed_fbd.sh 0",
        r"DockerUsage_MegaFBD\.sh|test_train_gpt_distributed_fbd\.sh",
        ("megatronapp run examples/fbd.yaml --follow",),
        _FBD,
    ),
    LegacyCommand(
        "python tools/checkpoint/convert.py --bf16 --model-type GPT --loader llama_mistral --saver "
        "core --checkpoint-type hf "
        "--model-size llama3 --load-dir llama --save-dir llama-megatron --tokenizer-model llama/tokenizer.model\n"
        "python tools/checkpoint/convert.py --model-type GPT --loader legacy --saver core --load-dir "
        "gpt2-legacy --save-dir "
        "gpt2-core --vocab-file gpt2/vocab.json --megatron-path . --target-tensor-parallel-size 1\n"
        "python test_scripts/gpt2_convert.py --load_path gpt2 --save_path gpt2-legacy --megatron-path . "
        "--print-checkpoint-structure --target_params_dtype fp32 --make_vocab_size_divisible_by 1",
        r"convert\.py|gpt2_convert\.py",
        ("megatronapp checkpoint convert {args}",),
        "the options are understood; docs/checkpoints.md has their table",
    ),
    LegacyCommand(
        "bash test_scripts/convert_hf_to_megatron.sh",
        r"convert_hf_to_megatron\.sh",
        ("megatronapp checkpoint convert --load-dir gpt2 --save-dir checkpoints/gpt2",),
        "from the folder of Hugging Face to a checkpoint that trains and serves; no second step",
    ),
    LegacyCommand(
        "bash test_scripts/convert_legacy_to_core.sh",
        r"convert_legacy_to_core\.sh",
        ("megatronapp checkpoint convert --loader legacy --load-dir gpt2-legacy --save-dir checkpoints/gpt2",),
        "only for files that Megatron-LM wrote (mp_rank_...)",
    ),
    LegacyCommand(
        "wget https://api.ngc.nvidia.com/v2/models/nvidia/megatron_lm_345m/versions/v0.0/zip -O "
        "megatron_lm_345m_v0.0.zip",
        r"wget .*megatron_.*345m.*|unzip .*345m.*",
        (
            "huggingface-cli download openai-community/gpt2-medium --local-dir gpt2-medium",
            "megatronapp checkpoint convert --load-dir gpt2-medium --save-dir checkpoints/gpt2-medium",
        ),
        "the files of NGC do not say what their model is; Hugging Face has one of the same size",
    ),
    LegacyCommand(
        "huggingface-cli download meta-llama/Meta-Llama-3-8B-Instruct --local-dir llama3 "
        "--local-dir-use-symlinks False",
        r"huggingface-cli download|hf download",
        (
            "{same}",
            "megatronapp checkpoint convert --load-dir {--local-dir=FOLDER} --save-dir {--local-dir=FOLDER}-core",
        ),
        "runs as it is; then its folder is converted",
    ),
    LegacyCommand(
        "bash examples/inference/a_text_generation_server_bash_script.sh /path/to/model /path/to/tokenizer\n"
        "bash examples/inference/llama_mistral/run_text_generation_llama3.sh /ckpts/llama3-core /ckpts/llama3",
        r"a_text_generation_server_bash_script\.sh|run_text_generation_(server_|wsserver_)?\w+\.sh",
        ("megatronapp serve --load {1=CHECKPOINT} --tokenizer-file {2=FOLDER}/tokenizer.json",),
        "the checkpoint says what its model is; one that was converted here has its tokenizer in its folder",
    ),
    LegacyCommand(
        "torchrun --nproc_per_node 1 tools/run_text_generation_server.py --load gpt2-core "
        "--tensor-model-parallel-size 1 "
        "--tokenizer-type GPT2BPETokenizer --vocab-file gpt2/vocab.json --merge-file gpt2/merges.txt "
        "--enable-ws-server",
        r"run_text_generation_server\.py",
        ("megatronapp serve {args}",),
        "the options are understood; docs/serving.md has their table",
    ),
    LegacyCommand(
        "bash test_scripts/test_text_generation_server_gpt2.sh",
        r"test_text_generation_server_gpt2\.sh",
        ("megatronapp serve --load checkpoints/gpt2",),
        "one server answers programs, and its page shows the model",
    ),
    LegacyCommand(
        "python tools/text_generation_cli.py localhost:5000\ncurl -X PUT http://localhost:5000/api",
        r"text_generation_cli\.py|curl (.* )?-X ?(PUT|POST)",
        ("megatronapp serve --print serve",),
        "address and key for a shell; the API is that of OpenAI (docs/serving.md)",
    ),
    LegacyCommand(
        "cd transformer-visualize\ncd tools/visualization/transformer-visualize\nnpm install\nnpm "
        "run dev\nnpm run build\n"
        "open http://localhost:5173",
        r"cd (.*/)?transformer-visualize.*|npm (install|run).*|.*localhost:5173.*",
        ("megatronapp ui serve",),
        _INSPECT,
    ),
    LegacyCommand(
        "python tools/aggregate_benchmarks.py --b trace_output --output benchmark.json\n"
        "python scripts/aggregate.py --benchmark . --output benchmark.json\npython scripts/aggregate.py -b . -d\n"
        "python tools/aggregate.py --bench-dir trace_output --detect\n"
        "python aggregate.py --benchmark_dir benchmark/data-1-pipeline-4-tensor-1-pp\n"
        "bash test_scripts/aggregate_trace.sh",
        r"aggregate(_benchmarks)?(\.py)?|aggregate_trace\.sh",
        ("megatronapp aggregate {args}",),
        "the files of MegatronApp's ranks are read, and the options understood; of a job here, megatronapp trace "
        "export JOB writes the spans of all ranks, and megatronapp describe JOB names slow ranks while it runs",
    ),
    LegacyCommand(
        "bash profiling/profile_all.sh\npython profiling/process_peak_memory.py\npython profiling/process_send.py\n"
        "python profiling/process_trace.py\npython profiling/process_computing_window.py\n"
        "python profiling/process_computing_ratio.py\npython profiling/process_sending_window.py "
        "--benchmark_dir benchmark/data-1-pipeline-4-tensor-1-dpp",
        r"profile_all\.sh|process_(peak_memory|send|trace|(comput|send)ing_(window|ratio)\w*)\.py",
        ("megatronapp trace export JOB -o {--output=benchmark.json}", "megatronapp ui JOB"),
        "passes, transfers and waits of each step are recorded while a job runs; its page has their timeline and the "
        "time of each step",
        "plots of sending windows and of peak memory",
    ),
    LegacyCommand(
        "python profiling/shm_benchmark_1.py\npython profiling/shm_benchmark_5.py\n"
        "python profiling/baseline_benchmark.py",
        r"shm_benchmark_\d\.py|baseline_benchmark\.py",
        ("megatronapp transport bench --gloo",),
        "each pair of ranks of this machine, next to memcpy and gloo",
    ),
    LegacyCommand(
        "open chrome://tracing\nopen https://ui.perfetto.dev",
        r".*(chrome://tracing|ui\.perfetto\.dev).*",
        ("megatronapp trace export JOB -o trace.json",),
        "both open the file; the page of a job also has a timeline",
    ),
    LegacyCommand(
        "bash scripts/gpu_control.sh limit 0 900",
        r"gpu_control\.sh limit.*",
        ("megatronapp inject JOB --rank {2=0} --kind compute --factor 2 --from-step 20 --steps 50",),
        "a rank is made slow for some steps, without root and on CPUs too, and is itself again afterwards",
    ),
    LegacyCommand(
        "bash scripts/gpu_control.sh reset 0\nbash scripts/gpu_control.sh monitor",
        r"gpu_control\.sh.*",
        ("megatronapp describe JOB",),
        "a fault ends after its steps; this prints state and verdicts of the ranks",
    ),
    LegacyCommand(
        "kubectl apply -f job.yaml",
        r"kubectl (apply|create) .*",
        _APPLY,
        "runs with a MegatronJob, once the chart is installed (charts/megatronapp/README.md)",
    ),
    LegacyCommand(
        "kubectl port-forward svc/frontend 5173",
        r"kubectl port-forward.*",
        ("megatronapp ui JOB --cluster",),
        _INSPECT,
    ),
    LegacyCommand(
        "helm install megatronapp ./chart",
        r"helm (install|upgrade) .*",
        ("helm install megatronapp charts/megatronapp",),
        "values and rights are in charts/megatronapp/README.md; Grafana's boards with grafanaDashboards.enabled (on)",
    ),
    LegacyCommand(
        "megatronapp train\nmegatronapp pretrain",
        r"megatronapp (pretrain|train)\b.*",
        _RUN,
        _ONE_JOB,
    ),
    LegacyCommand(
        "megatronapp convert --load-dir gpt2 --save-dir out",
        r"megatronapp convert\b.*",
        ("megatronapp checkpoint convert {args}",),
        "weights from Hugging Face and back, and from Megatron-LM",
    ),
    LegacyCommand(
        "megatronapp preprocess_data --input text.jsonl --output-prefix out --vocab-file vocab.json "
        "--merge-file merges.txt",
        r"megatronapp (preprocess_data|preprocess)\b.*",
        ("megatronapp data prepare {args}",),
        "the options of tools/preprocess_data.py are understood",
    ),
    LegacyCommand(
        "megatronapp aggregate",
        r"megatronapp aggregate\b.*",
        ("{same}",),
        "runs as it is: the spans of all ranks in one file, and with -d what is slow",
    ),
    LegacyCommand(
        "megatronapp trace aggregate",
        r"megatronapp trace aggregate\b.*",
        ("megatronapp aggregate -o {--output=benchmark.json}",),
        "the spans of all ranks in one file, and with -d what is slow; -b FOLDER has the files of the ranks",
    ),
)
