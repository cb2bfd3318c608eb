"""Conversion between texts and tokens, in the form of vLLM's routes, which evaluation harnesses use."""

import anyio.to_thread
from fastapi import APIRouter

from megatronapp_trainer.serve.dependencies import ModelOf
from megatronapp_trainer.serve.openai.generation_requests import chat_ids
from megatronapp_trainer.serve.openai.routes_openai import ANSWERS
from megatronapp_trainer.serve.openai.schemas_chat import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from megatronapp_trainer.serve.served_model import ServedModel

router = APIRouter()


@router.post("/tokenize", responses=ANSWERS)
async def tokenize(body: TokenizeRequest, model: ModelOf) -> TokenizeResponse:
    """Return the tokens of a text, or of messages."""
    return await anyio.to_thread.run_sync(_tokenized, body, model)


@router.post("/detokenize", responses=ANSWERS)
async def detokenize(body: DetokenizeRequest, model: ModelOf) -> DetokenizeResponse:
    """Return the text of tokens."""
    return DetokenizeResponse(prompt=await anyio.to_thread.run_sync(_detokenized, body, model))


@router.get("/tokenizer_info", responses=ANSWERS)
async def tokenizer_info(model: ModelOf) -> TokenizerInfo:
    """Return special tokens and the chat template."""
    tokens = model.chat.tokens
    return TokenizerInfo(
        bos_token=tokens.get("bos_token"),
        eos_token=tokens.get("eos_token", model.document_end_text),
        pad_token=tokens.get("pad_token"),
        chat_template=model.chat.text,
    )


def _tokenized(body: TokenizeRequest, model: ServedModel) -> TokenizeResponse:
    model.check_name(body.model)
    if body.messages is not None:
        ids = chat_ids(model, body.messages, add_generation_prompt=body.add_generation_prompt)
    else:
        ids = model.tokens_of(body.prompt or "", special=body.add_special_tokens)
    texts = list(map(model.text_of, ids)) if body.return_token_strs else None
    return TokenizeResponse(count=len(ids), max_model_len=model.capacity, tokens=list(ids), token_strs=texts)


def _detokenized(body: DetokenizeRequest, model: ServedModel) -> str:
    model.check_name(body.model)
    return model.text_of_all(body.tokens)
