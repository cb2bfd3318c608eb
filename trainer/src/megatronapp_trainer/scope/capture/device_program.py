"""Running a plan's program on the device that holds the shard, for all layers and heads at once.

R rows (layers, tokens, heads: all axes before the last one), W numbers of the shard, P its pixels, C columns. Kernels
are launched and nothing is waited for. Sixteen-bit numbers are computed with 32 bits. The numpy reference
(`megatronapp_common.filters.shard_plan.run`) gives the same within 1e-5 of the largest intermediate number.
"""

import torch

from megatronapp_common.filters.shard_plan import PixelGroup, ShardProgram, compute
from megatronapp_trainer.errors import TrainerError
from megatronapp_trainer.scope.capture.torch_backend import TorchBackend

SLAB_NUMBERS = 1 << 24
"""Numbers that are computed at once: 64 MiB for each step of a filter, however long the prompt is."""


class DeviceProgram:
    """A program with its indices on one device."""

    def __init__(self, program: ShardProgram, device: torch.device, *, dtype: torch.dtype = torch.float32) -> None:
        self.program = program
        self._backend = TorchBackend(dtype)
        self._dtype = dtype
        self._device = device
        self._groups = [_DeviceGroup(group, program, device) for group in program.groups]
        self._slab_rows = max(1, SLAB_NUMBERS // program.width)

    def buffer(self, *leading: int) -> torch.Tensor:
        """An empty buffer for the results of rows of this shape: [..., P, C]."""
        shape = (*leading, self.program.pixels, self.program.columns)
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    @torch.no_grad()
    def run(self, vectors_RW: torch.Tensor, out_RPC: torch.Tensor) -> None:
        """Reduce vectors [..., W] of any float type into the buffer [..., P, C]. Raises TrainerError."""
        program = self.program
        if vectors_RW.shape[-1] != program.width:
            raise TrainerError(f"a shard of {vectors_RW.shape[-1]} numbers was given to a plan of {program.width}")
        expected_shape = (*vectors_RW.shape[:-1], program.pixels, program.columns)
        if out_RPC.shape != expected_shape or not out_RPC.is_contiguous():
            raise TrainerError(f"the buffer is {tuple(out_RPC.shape)}; it must be {expected_shape} and contiguous")
        rows_RW = vectors_RW.reshape(-1, program.width)
        rows_RPC = out_RPC.view(-1, *expected_shape[-2:])
        slabs = zip(torch.split(rows_RW, self._slab_rows), torch.split(rows_RPC, self._slab_rows), strict=True)
        for slab_RW, slab_RPC in slabs:
            self._run_slab(slab_RW, slab_RPC)

    def _run_slab(self, slab_RW: torch.Tensor, out_RPC: torch.Tensor) -> None:
        for group in self._groups:
            data = group.gather(slab_RW).to(self._dtype)
            columns = compute(self.program, data, self._backend)
            group.put(columns[0] if len(columns) == 1 else torch.cat(columns, dim=-1), out_RPC)


class _DeviceGroup:
    """Pixels of one width. If they are all pixels of the shard, they are a view on it; otherwise they are gathered."""

    def __init__(self, group: PixelGroup, program: ShardProgram, device: torch.device) -> None:
        self._shape = (len(group.places), group.width)
        self._whole = len(group.places) == program.pixels
        self._columns = torch.from_numpy(group.index().reshape(-1)).to(device)
        self._places = torch.tensor(group.places, device=device)

    def gather(self, slab_RW: torch.Tensor) -> torch.Tensor:
        """The group's vectors: [R, pixels, width]."""
        chosen = slab_RW if self._whole else slab_RW.index_select(-1, self._columns)
        return chosen.reshape(*chosen.shape[:-1], *self._shape)

    def put(self, values: torch.Tensor, out_RPC: torch.Tensor) -> None:
        """Write the results [R, pixels, C] where they belong."""
        if self._whole:
            out_RPC.copy_(values)
        else:
            out_RPC.index_copy_(-2, self._places, values.to(out_RPC.dtype))
