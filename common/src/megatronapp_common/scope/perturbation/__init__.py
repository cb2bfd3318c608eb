"""Recipes of perturbations (docs/perturbation.md). Pure; `megatronapp_trainer.hooks.perturbation` applies them."""
