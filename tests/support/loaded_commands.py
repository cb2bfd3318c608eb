"""Commands of jobs, imported; the rules of manifests, compiled."""

import importlib

from megatronapp_common.job.load import load_job

for name in ("delete", "describe", "get", "inject", "logs", "run", "ui", "wait"):
    importlib.import_module(f"megatronapp_operator.cli.{name}")

MANIFEST = """
apiVersion: megatronapp.io/v1alpha1
kind: MegatronJob
metadata: {name: job}
spec:
  nodes: 1
  procPerNode: 1
  model: {type: gpt, numLayers: 2, hiddenSize: 8, numAttentionHeads: 1, seqLength: 8, vocabSize: 32}
  training: {microBatchSize: 1, globalBatchSize: 1, trainIters: 5, lr: 0.001}
  data: {mock: true}
"""
load_job(MANIFEST)
