"""Layers with a mixture of experts: megatron-core's router and dispatch around products of ours."""
