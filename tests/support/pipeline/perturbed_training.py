"""Ranks that train under orders to perturb, for tests: losses, weights at step boundaries, and values of sites."""

import json
from typing import Any

import torch
from captured_training import frames_of, jobs_instead_of_frames
from evaluated_training import EvaluationRecorder
from perturbing_ranks import recipe

SMALL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 8 --train-iters 4 --lr 2e-3 --mock-data --vocab-size 120 --eval-iters 1 --training-control "
    "--training-start-paused --training-resume-after 1"
)
Script = list[tuple[int, dict[str, Any]]]
"""Orders, each with the steps that are done when rank 0 first finds it in its control document."""
RESUME = 50
"""Number of the order that ends the pause before the first step."""


def perturb(number: int, *perturbations: dict[str, Any], seed: int = 0, **fields: Any) -> dict[str, Any]:
    """An order to perturb."""
    text = recipe(*perturbations, seed=seed).canonical()
    return {"number": number, "kind": "perturb", "recipe": text, **fields}


class ScriptedOrders:
    """Control document that shows each order from its step on; those before the first step precede its `resume`."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.steps_done = 0

    def read_new(self) -> dict[str, Any]:
        orders = [{"number": RESUME, "kind": "resume"}]
        for step, order in self._script:
            if step <= self.steps_done:
                orders.append(order if step == 0 else order | {"number": order["number"] + RESUME})
        return {"training": {"attempt": 0, "orders": orders, "renewals": 0}}


class PassReader:
    """Read hooks on a site of a rank's chunks: the values of each pass, by layer, in the order of passes."""

    def __init__(self, chunks: list[Any], site: str) -> None:
        from megatronapp_trainer.hooks.sites import modules_of, site_of
        from megatronapp_trainer.training.perturbation.trained_perturbation import model_of

        self.values: dict[int, list[torch.Tensor]] = {}
        self._site = site_of(site)
        for chunk in chunks:
            for layer, module in modules_of(self._site, model_of(chunk)):
                if module is not None:
                    module.register_forward_hook(self._hook(layer), with_kwargs=True)

    def _hook(self, layer: int) -> Any:
        def read(_module: object, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            taken = self._site.take((*args, *kwargs.values()), output)
            value = taken[0] if isinstance(taken, tuple) else taken
            self.values.setdefault(layer, []).append(value.detach().clone())

        return read


def train(
    flags: str, script: Script, site: str | None = None, model: str = SMALL, free: int | None = None
) -> dict[str, Any]:
    """Train on this rank under scripted orders, as `pretrain` does it; what it has seen. `free`: bytes for recipes."""
    import warnings

    warnings.simplefilter("ignore")
    from megatronapp_trainer import pretrain
    from megatronapp_trainer.config import parse
    from megatronapp_trainer.errors import TrainerError
    from megatronapp_trainer.training import loop, progress
    from megatronapp_trainer.training.control import setup, training_control
    from megatronapp_trainer.training.control.order_reader import OrderReader

    training_control.PAUSE_ROUND_S = 0.01
    if free is not None:
        limit_memory(free)
    jobs = jobs_instead_of_frames() if "--scope-capture-interval" in flags else []
    page, recorder = ScriptedOrders(script), EvaluationRecorder()
    reports: list[dict[str, Any]] = []
    recorder.control = lambda report: reports.append(json.loads(json.dumps(report.to_json())))  # type: ignore[attr-defined]
    setup._open_reader = lambda: OrderReader(page, attempt=0)
    progress.make_reporter = lambda _config, layout: recorder if layout.is_reporter else None  # type: ignore[assignment, return-value]
    seen: dict[str, Any] = {"weights": [], "passes": [], "obeyed": {}}
    begin, at_boundary = loop.Trainer.__init__, training_control.TrainingControl.at_boundary

    def observed(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        seen["state"] = self._run.state
        seen["place"] = self._run.layout.tensor_rank, self._run.layout.data_rank
        if site is not None:
            seen["reader"] = PassReader(self._run.state.chunks, site)

    def recorded(self: Any, iteration: int) -> Any:
        page.steps_done = iteration
        decision = at_boundary(self, iteration)
        if "state" in seen:  # forward ranks of MegaFBD have none
            seen["weights"].append(global_weights(seen["state"].chunks))
        for order in self.obeyed:
            number = order.number - RESUME if order.number > RESUME else order.number
            seen["obeyed"][number] = order.step, order.refusal
        return decision

    loop.Trainer.__init__, training_control.TrainingControl.at_boundary = observed, recorded  # type: ignore[method-assign]
    try:
        code = pretrain.pretrain(parse(f"{model} {flags}".split()))
    except TrainerError as error:
        code = error.exit_code
    if "state" not in seen:
        return {"code": code, "losses": [], "obeyed": seen["obeyed"], "frames": frames_of(jobs)}
    return results_of(seen, recorder) | {"code": code, "reports": reports, "frames": frames_of(jobs)}


def limit_memory(free: int) -> None:
    """Limit the free bytes that this rank finds for perturbations."""
    from megatronapp_trainer.training.perturbation import setup

    setup.free_bytes = lambda device: free  # type: ignore[attr-defined]


def results_of(seen: dict[str, Any], recorder: EvaluationRecorder) -> dict[str, Any]:
    """Return what a rank with an optimizer has seen."""
    state = seen["state"]
    return {
        "losses": recorder.losses,
        "norms": recorder.grad_norms,
        "obeyed": seen["obeyed"],
        "weights": [*seen["weights"], global_weights(state.chunks)],
        "optimizer": optimizer_numbers(state.optimizer),
        "values": seen["reader"].values if "reader" in seen else {},
        "place": seen["place"],
        "perturbed": [(entry.digest, entry.first_step, entry.last_step) for entry in state.perturbed],
    }


def added_and_estimated(flags: str, perturbations: list[dict[str, Any]]) -> tuple[int, int]:
    """Bytes that a recipe adds to what a pass of one rank holds for its backward pass, and the estimate of them."""
    import small_training

    from megatronapp_trainer.hooks.perturbation.model_shard import model_shard_of
    from megatronapp_trainer.training.perturbation import trained_activations, training_memory
    from megatronapp_trainer.training.perturbation.trained_perturbation import model_of

    run = small_training.prepare(f"{SMALL} {flags}")
    samples, length = run.config.training.micro_batch_size, run.config.model.seq_length
    model = model_of(run.state.chunks[0])
    shard = model_shard_of(model, run.layout, vocabulary=120)
    plan = trained_activations.SamplePlan(micro_batch_size=samples, seq_length=length, data_rank=0, data_size=1)
    tokens = torch.arange(samples * length).view(samples, length) % 120
    places = torch.arange(length).expand(samples, -1)

    def measured() -> int:
        storages: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run.state.chunks[0](tokens, places, None, labels=tokens)
        return sum(storage.nbytes() for storage in storages.values())

    before = measured()
    found = recipe(*perturbations)
    activations = trained_activations.TrainingActivations(found, [model], shard, plan)
    activations.install(0, 0)
    added = measured() - before
    memory = training_memory.TrainingMemory(
        shard=shard,
        tokens=samples * length,
        sequence_parallel=False,
        recomputed_layers=None,
        master_parts=1,
        peak=sum,
        free_bytes=lambda: 0,
    )
    return added, memory.activation_bytes(found, [model])


def global_weights(chunks: list[Any]) -> dict[str, torch.Tensor]:
    """Copies of the parameters of a rank by their names in the whole model."""
    from megatronapp_trainer.training.perturbation.trained_perturbation import model_of

    found: dict[str, torch.Tensor] = {}
    for model in map(model_of, chunks):
        named = {name: value for name, value in model.named_parameters() if not name.startswith("decoder.layers.")}
        for layer in model.decoder.layers:
            prefix = f"decoder.layers.{layer.layer_number - 1}."
            named |= {prefix + name: value for name, value in layer.named_parameters()}
        found |= {name: value.detach().clone() for name, value in named.items()}
    return found


def optimizer_numbers(optimizer: Any) -> list[torch.Tensor]:
    """All tensors of the optimizer's state."""
    found = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                found += [parameter.detach().clone(), *part.optimizer.state[parameter].values()]
    return [value for value in found if isinstance(value, torch.Tensor)]
