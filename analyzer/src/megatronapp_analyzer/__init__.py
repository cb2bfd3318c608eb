"""megatronapp_analyzer."""
