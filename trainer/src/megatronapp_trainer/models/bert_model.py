"""megatron-core's BERT with the layers of this trainer, and its losses in one tensor. B microbatch, S sequence."""

from typing import Any

import torch
from megatron.core.models.bert import bert_lm_head
from megatron.core.models.bert.bert_model import BertModel

from megatronapp_trainer.models.norm import TorchNorm

# megatron-core's own norm for the head of the language model is Apex's, or refuses sequence parallelism.
bert_lm_head.LNImpl = TorchNorm


class BertEncoder(BertModel):  # type: ignore[misc] # megatron-core carries no types
    """BertModel whose last chunk puts out [B, S + 2]: the loss of each token, and two logits of the sentence order.

    Without the head of the sentence order it puts out [B, S]. Layers get a padding mask that is the same for all
    queries of a sample; what padding attends to has no effect on any loss.
    """

    @property
    def decoder(self) -> Any:  # noqa: ANN401 - TransformerBlock
        """Return the block of layers, under its name in models with a causal mask."""
        return self.encoder

    def forward(
        self,
        tokens: torch.Tensor,
        padding_mask: torch.Tensor,
        token_types: torch.Tensor | None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the hidden states for the next chunk, or the losses of the last one.

        Takes int64 [B, S], the padding mask with 1 at tokens.
        """
        types = token_types if self.add_binary_head else None  # without the head there is no embedding of types
        output = super().forward(tokens, padding_mask, tokentype_ids=types, lm_labels=labels)
        if not self.post_process:
            hidden: torch.Tensor = output
            return hidden
        losses, order_logits = output
        if order_logits is None:
            only: torch.Tensor = losses
            return only
        return torch.cat((losses.float(), order_logits.float()), 1)

    def _sanity_check_attention_and_get_attn_mask_dimension(self) -> str:
        """Choose a mask of one row for each sample, [B, 1, 1, S], which both core attentions take."""
        return "b11s"
