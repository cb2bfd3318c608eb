"""megatronapp_trainer."""
