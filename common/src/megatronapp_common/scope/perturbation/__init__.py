"""Recipes of perturbations (docs/perturbation.md). Pure; the implementation is `megatronapp_trainer.perturbation`."""
