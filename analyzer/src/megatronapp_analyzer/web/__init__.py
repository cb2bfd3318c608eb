"""What the HTTP interfaces of hub and MegaScope share: models, roles and error answers. Knows neither."""
